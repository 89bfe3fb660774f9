"""A rank process: `python -m scheduler.rank`, started by the supervisor.

It reads one JSON line, a `Settings`, from standard input; loads the model, announces RankReady and serves until told to
shut down or until its parent is gone. Exit status: 0 after a shutdown message, 2 for settings or files that cannot work
(one `error:` line on standard error), 1 for anything else.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time

import msgspec
import zmq

from models import ModelError
from scheduler.config import EngineConfig
from scheduler.engine import Engine, EngineError
from scheduler.hand_over import HandOverAddress
from scheduler.memory import MemoryLeak
from scheduler.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    Inbound,
    LoadReport,
    Outbound,
    RankReady,
    RequestOutput,
    StepOutput,
    decode_inbound,
    encode,
)

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_REPORT_INTERVAL = 0.5
_IDLE_POLL_MS = 1000
# Time-outs of transfers are noticed so late at most.
_STALLED_POLL_MS = 100


class Settings(msgspec.Struct, frozen=True):
    """inbound, outbound: ZeroMQ addresses bound by the API process. parent_pid: 0 when unknown.

    address: on prefill and decode servers.
    """

    config: EngineConfig
    rank: int
    inbound: str
    outbound: str
    parent_pid: int = 0
    address: HandOverAddress | None = None


class Watchdog:
    """Ends the process, with every thread's stack on standard error, when one step takes longer than `timeout` s."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._step_started: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __enter__(self) -> None:
        self._step_started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._step_started = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            started = self._step_started
            if started is not None and time.monotonic() - started > self._timeout:
                print(f"error: a step has taken more than --watchdog-timeout {self._timeout:g} s", file=sys.stderr)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(1)


class Meter:
    """Turns the scheduler's totals into rates, a load report now and then and a status line every few seconds."""

    def __init__(self, engine: Engine, rank: int, log_interval: float) -> None:
        self._engine, self._rank, self._log_interval = engine, rank, log_interval
        now = time.monotonic()
        self._last_report, self._last_log = now, now
        self._report_tokens = self._log_tokens = 0
        self._throughput = 0.0
        self._was_idle = True

    def report(self, *, force: bool = False) -> LoadReport | None:
        """A report when one is due: at intervals under load, at once on becoming idle, and when `force` is set."""
        now = time.monotonic()
        idle = self._engine.is_idle
        if not force and not (idle and not self._was_idle) and now - self._last_report < _REPORT_INTERVAL:
            return None
        load = self._engine.scheduler.load(self._rank)
        elapsed = now - self._last_report
        if elapsed >= _REPORT_INTERVAL:
            self._throughput = (load.generated_tokens_total - self._report_tokens) / elapsed
            self._last_report, self._report_tokens = now, load.generated_tokens_total
        self._was_idle = idle
        return msgspec.structs.replace(load, generation_throughput=0.0 if idle else self._throughput)

    def log_status(self) -> None:
        now = time.monotonic()
        if now - self._last_log < self._log_interval:
            return
        load = self._engine.scheduler.load(self._rank)
        rate = (load.generated_tokens_total - self._log_tokens) / (now - self._last_log)
        self._last_log, self._log_tokens = now, load.generated_tokens_total
        logger.info(
            "running %d, waiting %d, %.1f tokens/s, KV use %.1f%%, cache hit rate %.1f%%",
            load.running_requests,
            load.waiting_requests,
            rate,
            100 * load.used_tokens / load.total_tokens,
            100 * load.cache_hit_rate,
        )


class Rank:
    """The loop: take messages, run a step, send its outputs."""

    def __init__(self, engine: Engine, settings: Settings, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._engine = engine
        self._rank = settings.rank
        self._log_requests = settings.config.log_requests
        self._inbound = context.socket(zmq.PULL)
        self._outbound = context.socket(zmq.PUSH)
        for socket, address in ((self._inbound, settings.inbound), (self._outbound, settings.outbound)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(address)
        self._meter = Meter(engine, settings.rank, settings.config.decode_log_interval)
        self._watchdog = Watchdog(settings.config.watchdog_timeout)
        # What a rank with nothing to launch waits for: messages, and transfers whose state has changed.
        self._poller = zmq.Poller()
        self._poller.register(self._inbound, zmq.POLLIN)
        self._wake_fd = -1 if engine.hand_over is None else engine.hand_over.manager.wake_fd
        if self._wake_fd >= 0:
            self._poller.register(self._wake_fd, zmq.POLLIN)
        self._running = True
        self._checked_idle = True

    def announce(self) -> None:
        engine, info = self._engine, self._engine.info
        self._send(
            RankReady(
                rank=self._rank,
                max_total_tokens=engine.memory.total_tokens,
                max_running_requests=engine.memory.max_requests,
                context_length=engine.context_length,
                vocab_size=info.vocab_size,
                eos_token_ids=list(info.eos_token_ids),
                dtype=str(info.dtype).removeprefix("torch."),
                device=str(engine.device),
                load_seconds=engine.load_seconds,
            )
        )

    def run(self) -> None:
        while self._running:
            self._wait()
            self._take_messages()
            if self._engine.is_idle:
                outputs = self._engine.scheduler.take_early_outputs()
                self._on_idle()
            else:
                self._checked_idle = False
                with self._watchdog:
                    outputs = self._engine.step()
                self._meter.log_status()
            self._publish(outputs)

    def _wait(self) -> None:
        """Until there may be something to do."""
        timeout = 0
        if self._engine.is_idle:
            timeout = _IDLE_POLL_MS
        elif self._engine.is_stalled:
            timeout = _STALLED_POLL_MS
        elif self._wake_fd < 0:
            return
        # Drained before the step looks at the transfers, so that nothing that happens after its look is missed.
        if any(ready == self._wake_fd for ready, _ in self._poller.poll(timeout)):
            os.eventfd_read(self._wake_fd)

    def _take_messages(self) -> None:
        while True:
            try:
                data = self._inbound.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_inbound(data)
            except msgspec.DecodeError as error:
                logger.error("a message of %d bytes cannot be read and is dropped: %s", len(data), error)
                continue
            self._handle(message)

    def _handle(self, message: Inbound) -> None:
        match message:
            case GenerateRequest():
                if self._log_requests:
                    count = len(message.input_ids)
                    logger.info("request %s: %d prompt tokens, %s", message.rid, count, message.sampling)
                self._engine.submit(message)
            case AbortRequest():
                if message.rid:
                    self._engine.scheduler.abort(message.rid)
                elif message.all:
                    self._engine.scheduler.abort_all()
            case ControlRequest():
                self._control(message)

    def _control(self, request: ControlRequest) -> None:
        ok, text = True, ""
        state: dict[str, str | int | float | bool | None] = {}
        match request.kind:
            case "ping":
                pass
            case "flush_cache":
                ok = self._engine.is_idle and self._engine.scheduler.flush_cache()
                text = "" if ok else "requests are running or waiting; the cache was not flushed"
            case "state":
                state = self._state()
            case "shutdown":
                self._running = False
            case _:
                ok, text = False, f"unknown control request {request.kind!r}"
        self._send(ControlReply(request.id, self._rank, ok, text, state))

    def _state(self) -> dict[str, str | int | float | bool | None]:
        load = self._engine.scheduler.load(self._rank)
        fields: dict[str, str | int | float | bool | None] = {
            name: getattr(load, name) for name in load.__struct_fields__
        }
        fields["overlap"] = self._engine.overlap
        fields["page_size"] = self._engine.memory.page_size
        return fields

    def _publish(self, outputs: list[RequestOutput]) -> None:
        load = self._meter.report(force=any(output.finish is not None for output in outputs))
        if outputs or load is not None:
            self._send(StepOutput(self._rank, outputs, load))
        if self._log_requests:
            for output in outputs:
                if output.finish is not None:
                    logger.info("request %s finished: %s", output.rid, output.finish.reason)

    def _on_idle(self) -> None:
        if not self._checked_idle:
            self._checked_idle = True
            try:
                self._engine.scheduler.check_memory()
            except MemoryLeak as leak:
                logger.error("memory leak: %s", leak)

    def _send(self, message: Outbound) -> None:
        self._outbound.send(encode(message))


def _die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends, whatever ends it. parent_pid: 0 when unknown."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid and os.getppid() != parent_pid:
        sys.exit("error: the parent process is already gone")


def main() -> int:
    # Stopping is the supervisor's decision: a terminal or process manager may signal the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    _die_with_parent(settings.parent_pid)
    logging.basicConfig(
        level=settings.config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s rank {settings.rank}: %(message)s",
        stream=sys.stderr,
    )
    try:
        engine = Engine(settings.config, settings.address)
    except ValueError as error:
        if not isinstance(error, (EngineError, ModelError)):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    with zmq.Context() as context:
        rank = Rank(engine, settings, context)
        rank.announce()
        rank.run()
        context.destroy(linger=1000)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
