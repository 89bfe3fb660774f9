"""A prefill and a decode scheduler with fake runners, whose KV really travels through a KV manager."""

from __future__ import annotations

import itertools
import random
import time

from disagg.base import KVArgs, KVPoll, Role, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.registry import KV_MANAGERS
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.hand_over import HandOver
from scheduler.messages import Bootstrap, GenerateRequest, SamplingParams
from scheduler.metadata_rows import MetadataRows
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import Incoming, Request
from scheduler.scheduler import Scheduler, SchedulerLimits
from tests.disagg.support import wait_until
from tests.scheduler.fake_runner import FakeEngine

# Far above what a loaded machine takes: a test that means a time-out sets it.
OPTIONS = TransferOptions(bootstrap_timeout=60, waiting_timeout=60, heartbeat_interval=2, heartbeat_failures=20)


class FakePair:
    """`prefill` and `decode` are settings of one side's FakeEngine, `both` of both."""

    def __init__(
        self,
        backend: str = "tcp",
        prefill: dict[str, object] | None = None,
        decode: dict[str, object] | None = None,
        reserved_tokens: int = 8,
        options: TransferOptions = OPTIONS,
        **both: object,
    ) -> None:
        self.backend, self.reserved_tokens, self.options = backend, reserved_tokens, options
        self.bootstrap = BootstrapServer("127.0.0.1", 0)
        self.rooms = itertools.count(1)
        self.prefill = FakeEngine(role=self._prefill_scheduler, **{**both, **(prefill or {})})  # type: ignore[arg-type]
        self.decode = FakeEngine(role=self._decode_scheduler, **{**both, **(decode or {})})  # type: ignore[arg-type]
        self.sides = (self.prefill, self.decode)

    def _hand_over(self, engine: FakeEngine, role: Role) -> HandOver:
        kv, rows = engine.runner.kv, MetadataRows(engine.memory.max_requests)
        args = KVArgs(
            model="fake",
            page_size=engine.memory.page_size,
            kv_dtype="int64",
            kv_layout="position and token",
            kv_head_num=1,
            total_kv_head_num=1,
            kv_data_ptrs=[kv.ctypes.data],
            kv_data_lens=[kv.nbytes],
            kv_item_lens=[engine.memory.page_size * kv.strides[0]],
            kv_layer_ids=[0],
            aux_data_ptrs=[rows.array.ctypes.data],
            aux_data_lens=[rows.array.nbytes],
            aux_item_lens=[rows.array.strides[0]],
        )
        address = self.bootstrap.address if role == "prefill" else None
        return HandOver(KV_MANAGERS[self.backend](args, role, self.options, address), rows)

    def _prefill_scheduler(self, engine: FakeEngine, limits: SchedulerLimits) -> Scheduler:
        return PrefillScheduler(engine.memory, limits, engine.eos, self._hand_over(engine, "prefill"))

    def _decode_scheduler(self, engine: FakeEngine, limits: SchedulerLimits) -> Scheduler:
        hand_over = self._hand_over(engine, "decode")
        return DecodeScheduler(engine.memory, limits, engine.eos, hand_over, self.reserved_tokens)

    def submit(self, rid: str, prompt: list[int], params: SamplingParams) -> None:
        request = GenerateRequest(
            rid, prompt, params, bootstrap=Bootstrap("127.0.0.1", self.bootstrap.port, next(self.rooms))
        )
        for side in self.sides:
            side.scheduler.add(request)

    def step(self) -> bool:
        """One step of each side; whether either had something to say or to do."""
        busy = False
        for side in self.sides:
            launched = len(side.batches)
            busy |= bool(side.step()) or len(side.batches) > launched or side.pending is not None
        return busy

    def step_or_rest(self) -> bool:
        """As step(); where there was nothing to do, with some time for the transfer's threads."""
        busy = self.step()
        if not busy:
            time.sleep(0.0002)
        return busy

    @property
    def is_idle(self) -> bool:
        return all(side.scheduler.is_idle and side.pending is None for side in self.sides)

    def run(self, seconds: float = 60.0) -> None:
        limit = time.monotonic() + seconds
        while self.step_or_rest() or not self.is_idle:
            assert time.monotonic() < limit, f"not idle after {seconds} s"

    def check_drained(self) -> None:
        for side in self.sides:
            scheduler = side.scheduler
            assert isinstance(scheduler, PrefillScheduler | DecodeScheduler)
            scheduler.check_memory()
            # Messages about rooms that one side has given up may still be on their way.
            wait_until(lambda hand_over=scheduler.hand_over: hand_over.num_rooms == 0)  # type: ignore[misc]
            assert scheduler.flush_cache()
            assert side.memory.allocator.num_free == side.memory.allocator.num_pages

    def close(self) -> None:
        for side in reversed(self.sides):
            assert isinstance(side.scheduler, PrefillScheduler | DecodeScheduler)
            side.scheduler.hand_over.close()
        self.bootstrap.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


def params(count: int = 8) -> SamplingParams:
    return SamplingParams(count, 1, ignore_eos=True)


def prefill_until(pair: FakePair, requests: list[Request], state: KVPoll) -> None:
    """Steps of the prefill side alone until all these requests of the decode side are so far."""
    limit = time.monotonic() + 60
    while not all(isinstance(r.transfer, Incoming) and r.transfer.receiver.poll() is state for r in requests):
        pair.prefill.step()
        time.sleep(0.0002)
        assert time.monotonic() < limit, f"not all are {state.name}"


def receive(pair: FakePair) -> None:
    """Brings over what the decode side has room for. None of it decodes yet, so that all of it will together."""
    decode = pair.decode.scheduler
    assert isinstance(decode, DecodeScheduler)
    prefill_until(pair, decode.connecting, KVPoll.WaitingForInput)
    pair.decode.step()
    prefill_until(pair, decode.receiving, KVPoll.Success)


def until(pair: FakePair, rid: str, state: str) -> None:
    """Steps until the request is in this state on one side."""
    limit = time.monotonic() + 60
    while not any(
        rid in side.scheduler.requests and side.scheduler.requests[rid].state.value == state for side in pair.sides
    ):
        pair.step_or_rest()
        assert time.monotonic() < limit, f"{rid} was never {state}"
