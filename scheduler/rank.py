"""A rank process: `python -m scheduler.rank`, started by the supervisor.

It reads one JSON line, a `RankSettings`, from standard input; loads the model, announces RankReady and serves until
told to shut down or until its parent is gone. SIGUSR1 makes it say where it is (`scheduler.watchdog`). Exit status: 0
after a shutdown message, 2 for settings or files that cannot work (one `error:` line on standard error), 3 when another
rank of the engine is gone (so does this), 4 when a step hung, 1 for anything else.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

import msgspec
import zmq

from layers import process_groups
from models import ModelError
from scheduler.config import RankSettings, refusing
from scheduler.engine import Engine, EngineError
from scheduler.lifeline import leave_word
from scheduler.memory import MemoryLeak
from scheduler.messages import (
    STATUS_PEER_LOST,
    AbortRequest,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    Inbound,
    LoadReport,
    Outbound,
    RankReady,
    RankState,
    RequestOutput,
    StepOutput,
    encode,
)
from scheduler.rendezvous import Rendezvous
from scheduler.step_exchange import Follower, FollowerAddress, Leader, PeerLost, StepExchange, unbounded_socket
from scheduler.step_plan import Desync
from scheduler.watchdog import Watchdog

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_REPORT_INTERVAL = 0.5  # seconds
_IDLE_POLL_MS = 1000
# Time-outs of transfers are noticed so late at most.
_STALLED_POLL_MS = 100
# A transfer that ends on another rank wakes nobody here.
_STALLED_GROUP_POLL_MS = 2
# The leader says a word to its followers at least each _IDLE_POLL_MS, and else runs a step, which has its own time-out.
_SILENCE_LEAD = 10.0


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
        """A report when one is due: at intervals, at once on becoming busy or idle, and when `force` is set."""
        now = time.monotonic()
        idle = self._engine.is_idle
        if not force and idle == self._was_idle and now - self._last_report < _REPORT_INTERVAL:
            return None
        load = self._engine.scheduler.load(self._rank)
        elapsed = now - self._last_report
        if elapsed >= _REPORT_INTERVAL:
            self._throughput = (load.generated_tokens_total - self._report_tokens) / elapsed
            self._last_report, self._report_tokens = now, load.generated_tokens_total
        self._was_idle = idle
        return msgspec.structs.replace(load, generation_throughput=0.0 if idle else self._throughput)

    def log_status(self) -> None:
        """To be called after steps; those of a group in which nobody has work have no line."""
        now = time.monotonic()
        if now - self._last_log < self._log_interval:
            return
        load = self._engine.scheduler.load(self._rank)
        generated = load.generated_tokens_total - self._log_tokens
        rate = generated / (now - self._last_log)
        self._last_log, self._log_tokens = now, load.generated_tokens_total
        if self._engine.is_idle and not generated:
            return
        logger.info(
            "running %d, waiting %d, %.1f tokens/s, KV use %.1f%%, cache hit rate %.1f%%",
            load.running_requests,
            load.waiting_requests,
            rate,
            100 * load.used_tokens / load.total_tokens,
            100 * load.cache_hit_rate,
        )


class Rank:
    """The loop: take messages, run a step, send its outputs. Of ranks with the same requests only the first sends."""

    def __init__(
        self, engine: Engine, settings: RankSettings, rendezvous: Rendezvous, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._engine, self._rendezvous = engine, rendezvous
        # To the API process the ranks that have the same requests are one.
        self._rank = engine.groups.dp_rank
        self._log_requests = settings.config.log_requests
        self._exchange = _make_exchange(engine, settings, rendezvous, context)
        self._outbound: zmq.Socket[bytes] | None = None
        if engine.groups.attention.rank == 0:
            address = rendezvous.outputs_address() if rendezvous.is_remote else settings.outbound
            self._outbound = _push_socket(context, address)
        # A parent on another host than the API process wants to know too that its ranks are there.
        self._parent = _push_socket(context, settings.outbound) if rendezvous.is_remote else None
        self._meter = Meter(engine, self._rank, settings.config.decode_log_interval)
        self._watchdog = Watchdog(settings.config.watchdog_timeout, _number(settings), lambda: engine.phase)
        engine.publish_early = self._publish
        self._running = True
        self._checked_idle = True

    def announce(self) -> None:
        engine, info = self._engine, self._engine.info
        ready = RankReady(
            rank=self._rank,
            max_total_tokens=engine.memory.total_tokens,
            max_running_requests=engine.memory.max_requests,
            context_length=engine.context_length,
            vocab_size=info.vocab_size,
            eos_token_ids=list(info.eos_token_ids),
            dtype=str(info.dtype).removeprefix("torch."),
            device=str(engine.device),
            load_seconds=engine.load_seconds,
            expert_dtype=None if info.expert_dtype is None else str(info.expert_dtype).removeprefix("torch."),
            hand_over={} if engine.hand_over is None else engine.hand_over.terms,
        )
        self._send(ready)
        self._rendezvous.say_ready()
        if self._parent is not None:
            self._parent.send(encode(msgspec.structs.replace(ready, rank=engine.groups.local_rank)))

    def run(self) -> None:
        outputs: list[RequestOutput] = []
        while self._running:
            begin = self._exchange.begin(outputs, self._wait_ms(), not self._engine.is_idle)
            for message in begin.messages:
                self._handle(message)
            # With other data-parallel ranks all of them make a step, or none.
            if self._engine.is_idle and not (begin.is_busy and self._engine.lockstep):
                outputs = self._engine.scheduler.take_early_outputs()
                self._on_idle()
            else:
                self._checked_idle = False
                with self._watchdog:
                    outputs = self._engine.step()
                self._meter.log_status()
            self._publish(outputs)

    def _wait_ms(self) -> int:
        """How long to wait for something to do."""
        if self._engine.is_idle:
            return _IDLE_POLL_MS
        if self._engine.is_stalled:
            return _STALLED_POLL_MS if self._engine.groups.world.size == 1 else _STALLED_GROUP_POLL_MS
        return 0

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
        state: RankState = {}
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

    def _state(self) -> RankState:
        fields: RankState = msgspec.structs.asdict(self._engine.scheduler.load(self._rank))
        fields["overlap"] = self._engine.overlap
        fields["decode_graphs"] = self._engine.runner.graphs is not None
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
        if self._outbound is not None:
            self._outbound.send(encode(message))


def _push_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = unbounded_socket(context, zmq.PUSH)
    socket.connect(address)
    return socket


def _make_exchange(
    engine: Engine, settings: RankSettings, rendezvous: Rendezvous, context: zmq.Context[zmq.Socket[bytes]]
) -> StepExchange:
    layout, peers = engine.groups.layout, settings.peers
    if peers is not None and settings.rank > 0:
        silence = settings.config.watchdog_timeout + _SILENCE_LEAD
        return Follower(context, engine.scheduler, rendezvous.steps_address(), silence)
    wake_fd = -1 if engine.hand_over is None else engine.hand_over.manager.wake_fd
    if peers is None:
        return Leader(context, engine.scheduler, [settings.inbound], wake_fd=wake_fd)
    followers = [
        FollowerAddress(rendezvous.bind_address(rank), layout.place(rank).dp_rank) for rank in range(1, layout.tp_size)
    ]
    leader = Leader(context, engine.scheduler, rendezvous.inbound_addresses(), followers, wake_fd)
    rendezvous.publish_steps(dict(enumerate(leader.bound, start=1)))
    return leader


def _die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends, whatever ends it. parent_pid: 0 when unknown."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid and os.getppid() != parent_pid:
        print("error: the parent process is already gone", file=sys.stderr)
        os._exit(1)


def _serve(engine: Engine, settings: RankSettings, rendezvous: Rendezvous) -> None:
    with zmq.Context() as context:
        rank = Rank(engine, settings, rendezvous, context)
        rank.announce()
        try:
            rank.run()
        finally:
            context.destroy(linger=1000)
    rendezvous.close()
    engine.close()


def _number(settings: RankSettings) -> int:
    """Among the ranks of all replicas, as the user sees it."""
    return settings.replica * settings.config.tp_size + settings.rank


def _log_level(settings: RankSettings) -> int:
    level = logging.getLevelNamesMapping()[settings.config.log_level.upper()]
    # The other ranks would say everything again.
    return max(level, logging.WARNING) if settings.rank > 0 and level > logging.DEBUG else level


def main() -> int:
    # Stopping is the supervisor's decision: a terminal or process manager may signal the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a watchdog to answer it
    settings = msgspec.json.decode(sys.stdin.readline(), type=RankSettings)
    _die_with_parent(settings.parent_pid)
    number = _number(settings)
    logging.basicConfig(
        level=_log_level(settings),
        format=f"%(asctime)s %(levelname)s {settings.name}{settings.name and ' '}rank {number}: %(message)s",
        stream=sys.stderr,
    )
    rendezvous = Rendezvous(settings.config, settings.rank, settings.replica, settings.peers)
    try:
        groups = rendezvous.join()
        _serve(Engine(settings.config, rendezvous.complete(settings.address), groups), settings, rendezvous)
    except (EngineError, ModelError) as error:
        with refusing(settings.refusals) as is_first:
            if rendezvous.is_first_refusal(str(error)) and is_first:
                print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        reason = str(error) if isinstance(error, (PeerLost, Desync)) else process_groups.peer_loss(error)
        if settings.peers is None or reason is None:
            raise
        print(f"error: rank {number} cannot go on without the others: {reason}", file=sys.stderr)
        which = reason if isinstance(error, (PeerLost, Desync)) else f"another rank is gone or late ({reason})"
        leave_word(settings.peers.last_word, which)
        return STATUS_PEER_LOST
    return 0


def run() -> NoReturn:
    """`main` and the end of the process, which is immediate.

    What the interpreter would do at its end waits for, or crashes over, the threads of collectives whose other ranks
    may be gone already. A rank that has ended as agreed would then end by a signal, and one that failed not at all.
    """
    status = 1
    try:
        status = main()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    run()
