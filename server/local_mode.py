"""Local mode: prefill servers, decode servers and a router as child processes of one command, on this host.

Every child is a `launch.py` of its own, so that the separate roles and this mode are one code path. The parent makes
all listening sockets and passes them on: every address is known before anything starts, and nobody else can take a
port in between. Children are killed when the parent ends, whatever ends it.

Exit statuses: 0 after an orderly end, 1 when a server ended by itself, 2 when one refused its settings or the model,
128 + signal number when a second signal cut the draining short.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

import server.logging
from server import arguments
from server.config import ChildReady, ParentLink, ServerConfig
from server.lifetime import SignalRepeats
from server.listening import base_url, listen
from server.local_config import LocalConfig
from server.local_plan import HOST, Plan, count_gpus, make_plans
from server.router_config import PrefillAddress, RouterConfig
from server.supervisor import ready_message

logger = logging.getLogger(__name__)

_LAUNCH = Path(__file__).resolve().parent.parent / "launch.py"
# Time for a broken group, or one that was told to stop at once, to end by itself.
_AT_ONCE_GRACE = 3.0
# Beyond --shutdown-timeout: time for a child to close its connections and end its ranks.
_END_GRACE = 10.0


def run(config: LocalConfig, listener: socket.socket) -> int:
    """Serves until told to stop; returns the exit status. listener: where the router takes requests."""
    server.logging.configure(config.servers.log_level, "local")
    return asyncio.run(_Group(config, listener).run())


class _Child:
    """One server of the group. It ends with this process."""

    def __init__(
        self,
        config: ServerConfig | RouterConfig,
        name: str,
        listener: socket.socket,
        refusals: int,
        bootstrap_listener: socket.socket | None = None,
        cores: AbstractSet[int] | None = None,
    ) -> None:
        """refusals: as in ParentLink. cores: those it may use, None for all.

        The listeners are the child's from here on.
        """
        self.name = name
        self.ready: ChildReady | None = None
        self.status, status = os.pipe()
        link = ParentLink(
            name=name,
            parent_pid=os.getpid(),
            listener=listener.fileno(),
            status=status,
            bootstrap_listener=-1 if bootstrap_listener is None else bootstrap_listener.fileno(),
            refusals=refusals,
        )
        words = arguments.words(msgspec.structs.replace(config, parent_link=link))
        passed = [number for number in (link.listener, link.bootstrap_listener, status, refusals) if number >= 0]
        own_cores = os.sched_getaffinity(0)
        try:
            # Inherited, so that no thread of the child can exist before it holds.
            os.sched_setaffinity(0, cores or own_cores)
            # A session of its own keeps Ctrl-C in the terminal from reaching it before the router has drained.
            self._process = subprocess.Popen(
                [sys.executable, str(_LAUNCH), *words],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, own_cores)
            os.close(status)
            # Kept open here, they would take connections to a child that is gone.
            for socket_ in (listener, bootstrap_listener):
                if socket_ is not None:
                    socket_.close()
        self.pidfd = os.pidfd_open(self._process.pid)  # readable once the process has ended

    def returncode(self) -> int | None:
        return self._process.poll()

    def describe_end(self) -> str:
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def terminate(self, *, at_once: bool = False) -> None:
        """Has it finish what it does, or drop it."""
        self._process.send_signal(signal.SIGTERM)
        if at_once:  # the second signal; another number, because equal ones may arrive as one
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()


class _Group:
    """Lives as long as the event loop. `_outcome` is set once, by whatever ends it; `_status` is the exit status."""

    def __init__(self, config: LocalConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._started = time.monotonic()
        self._children: list[_Child] = []
        self._prefill: list[_Child] = []
        self._decode: list[_Child] = []
        self._waiting: list[tuple[Plan, socket.socket, socket.socket | None]] = []
        self._status = 0
        self._repeats = SignalRepeats()
        self._refusals = os.memfd_create("refusals")

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[None] = loop.create_future()
        self._ends: dict[_Child, asyncio.Future[None]] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._start()
            await self._outcome
            await self._end()
        finally:
            self._kill()
            os.close(self._refusals)
        return self._status

    # Start

    def _start(self) -> None:
        config = self._config
        plans = make_plans(config, os.sched_getaffinity(0), count_gpus(config.servers.engine))
        has_bootstrap = config.servers.engine.disaggregation_transfer_backend != "fake"
        prefill: list[PrefillAddress] = []
        decode: list[str] = []
        for plan in plans:
            listener, bootstrap = listen(HOST, 0), None
            if plan.role == "decode":
                decode.append(base_url(listener))
            elif has_bootstrap:
                bootstrap = listen(HOST, 0)
                prefill.append(PrefillAddress(base_url(listener), bootstrap.getsockname()[1]))
            else:
                prefill.append(PrefillAddress(base_url(listener)))
            self._waiting.append((plan, listener, bootstrap))
        self._start_wave(0)
        router = msgspec.structs.replace(config.router, prefill=tuple(prefill), decode=tuple(decode))
        self._router = self._add(router, "router", self._listener)

    def _start_wave(self, wave: int) -> None:
        now = [waiting for waiting in self._waiting if waiting[0].wave == wave]
        self._waiting = [waiting for waiting in self._waiting if waiting[0].wave != wave]
        for plan, listener, bootstrap in now:
            child = self._add(plan.config, plan.name, listener, bootstrap, plan.cores)
            (self._prefill if plan.role == "prefill" else self._decode).append(child)

    def _add(
        self,
        config: ServerConfig | RouterConfig,
        name: str,
        listener: socket.socket,
        bootstrap: socket.socket | None = None,
        cores: AbstractSet[int] | None = None,
    ) -> _Child:
        loop = asyncio.get_running_loop()
        child = _Child(config, name, listener, self._refusals, bootstrap, cores)
        self._children.append(child)
        self._ends[child] = loop.create_future()
        loop.add_reader(child.pidfd, self._on_end, child)
        loop.add_reader(child.status, self._on_status, child)
        return child

    def _on_status(self, child: _Child) -> None:
        asyncio.get_running_loop().remove_reader(child.status)
        with os.fdopen(child.status, "rb") as status:
            line = status.read()
        # Without a line it ended first, which `_on_end` reports.
        if not line or self._outcome.done():
            return
        child.ready = msgspec.json.decode(line, type=ChildReady)
        logger.debug("%s is ready after %.1f s", child.name, time.monotonic() - self._started)
        workers_ready = all(worker.ready for worker in (*self._prefill, *self._decode))
        if workers_ready and self._waiting:
            self._start_wave(min(plan.wave for plan, _, _ in self._waiting))
        elif workers_ready and self._router.ready:
            self._announce()

    def _announce(self) -> None:
        config = self._config
        assert self._router.ready is not None
        decode = [child.ready for child in self._decode if child.ready is not None]
        ready = msgspec.structs.replace(
            decode[0],
            url=self._router.ready.url,
            max_total_tokens=sum(child.max_total_tokens for child in decode),
        )
        backend = config.servers.engine.disaggregation_transfer_backend
        layout = f"{config.num_prefill} prefill and {config.num_decode} decode over {backend}"
        print(ready_message(config.servers, ready, time.monotonic() - self._started, layout), flush=True)
        if backend == "fake":
            print("Outputs are not meaningful: the fake transfer backend moves no KV.", flush=True)

    # End

    def _on_signal(self, number: int) -> None:
        if self._repeats.is_repeat(number):
            return
        name = signal.Signals(number).name
        if self._outcome.done():
            logger.warning("%s: stopping at once", name)
            self._status = 128 + number
            for child in self._children:
                child.terminate(at_once=True)
            asyncio.get_running_loop().call_later(_AT_ONCE_GRACE, self._kill)
            return
        logger.info("%s: stopping; requests under way get %g s", name, self._config.servers.shutdown_timeout)
        self._finish(0)

    def _on_end(self, child: _Child) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        os.close(child.pidfd)
        end = child.describe_end()
        self._ends[child].set_result(None)
        if self._outcome.done():
            return
        if child.returncode() == 2:  # it has printed why
            logger.error("%s could not start; stopping all servers", child.name)
            self._finish(2)
            return
        logger.error("%s ended unexpectedly (%s); stopping all servers", child.name, end)
        self._finish(1)

    def _finish(self, status: int) -> None:
        if not self._outcome.done():
            self._status = status
            self._outcome.set_result(None)

    async def _end(self) -> None:
        if self._status != 0:
            # The router ends when its clients have read their errors.
            self._router.terminate()
            for child in (*self._decode, *self._prefill):
                child.terminate(at_once=True)
            await self._wait(self._children, _AT_ONCE_GRACE)
            return
        # A request under way needs all three, the router longest.
        for stage in ([self._router], self._decode, self._prefill):
            for child in stage:
                child.terminate()
            await self._wait(stage, self._config.servers.shutdown_timeout + _END_GRACE)

    async def _wait(self, children: Sequence[_Child], timeout: float) -> None:
        """Returns when they have ended, all killed where that takes too long."""
        ends = [self._ends[child] for child in children]
        _, running = await asyncio.wait(ends, timeout=timeout)
        if running:
            logger.warning("%s did not end within %g s", ", ".join(child.name for child in children), timeout)
            self._kill()
            await asyncio.wait(ends)

    def _kill(self) -> None:
        for child in self._children:
            child.kill()
