"""A prefill engine and a decode engine in this process, joined by a real KV manager."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from scheduler.config import EngineConfig
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.engine import Engine, Generation
from scheduler.hand_over import HandOverAddress
from scheduler.messages import Bootstrap, Finish, GenerateRequest, RequestOutput, SamplingParams
from scheduler.prefill_scheduler import PrefillScheduler

_rooms = itertools.count(1)


class Pair:
    """`outputs` has what each side said, by request id."""

    def __init__(self, prefill: Engine, decode: Engine, bootstrap: BootstrapServer) -> None:
        self.prefill, self.decode, self.bootstrap = prefill, decode, bootstrap
        self.prefill_outputs: dict[str, list[RequestOutput]] = {}
        self.decode_outputs: dict[str, list[RequestOutput]] = {}

    @property
    def prefill_scheduler(self) -> PrefillScheduler:
        assert isinstance(self.prefill.scheduler, PrefillScheduler)
        return self.prefill.scheduler

    @property
    def decode_scheduler(self) -> DecodeScheduler:
        assert isinstance(self.decode.scheduler, DecodeScheduler)
        return self.decode.scheduler

    def request(self, rid: str, prompt: list[int], sampling: SamplingParams, **options: Any) -> GenerateRequest:
        where = Bootstrap("127.0.0.1", self.bootstrap.port, next(_rooms))
        return GenerateRequest(rid, prompt, sampling, **{"bootstrap": where, **options})

    def submit(self, request: GenerateRequest) -> None:
        self.prefill.submit(request)
        self.decode.submit(request)

    def step(self) -> None:
        self._step(self.prefill, self.prefill_outputs)
        self._step(self.decode, self.decode_outputs)

    def _step(self, engine: Engine, said: dict[str, list[RequestOutput]]) -> None:
        for output in engine.step():
            said.setdefault(output.rid, []).append(output)

    def run(self, seconds: float = 100.0, *, in_order: bool = False) -> None:
        """Steps until both sides are idle.

        in_order: the decode side steps only when it has all the KV that it has found memory for. How many requests it
        has at a time does not depend on the threads of the transfers then.
        """
        limit = time.monotonic() + seconds
        while not (self.prefill.is_idle and self.decode.is_idle):
            self._step(self.prefill, self.prefill_outputs)
            waits = in_order and self._is_receiving()
            if not waits:
                self._step(self.decode, self.decode_outputs)
            if self.prefill.is_stalled and (waits or self.decode.is_stalled):
                time.sleep(0.0005)  # the transfer's threads need the processor
            assert time.monotonic() < limit, f"not idle after {seconds} s"

    def _is_receiving(self) -> bool:
        """Whether a request of the decode side can go on without a step of that side."""
        incoming = [request.transfer for request in self.decode_scheduler.connecting + self.decode_scheduler.receiving]
        return any(
            transfer.receiver.poll() is KVPoll.Bootstrapping
            or (transfer.started and transfer.receiver.poll() not in (KVPoll.Success, KVPoll.Failed))
            for transfer in incoming
        )

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, in_order: bool = False, **options: Any
    ) -> list[Generation]:
        """As Engine.generate, through both sides. in_order: as for `run`."""
        first = next(_rooms)
        rids = [f"{first}-{i}" for i in range(len(prompts))]
        for rid, prompt, sampling in zip(rids, prompts, params, strict=True):
            self.submit(self.request(rid, prompt, sampling, **options))
        self.run(in_order=in_order)
        return [joined(self.decode_outputs[rid]) for rid in rids]

    def check_drained(self) -> None:
        """Nothing is left of any request on either side."""
        for engine in (self.prefill, self.decode):
            assert engine.is_idle
            engine.scheduler.check_memory()
            assert engine.hand_over is not None
            assert engine.hand_over.num_rooms == 0
            assert not engine.hand_over.rows.array[1:, 0].any() or engine is self.prefill
            assert engine.scheduler.flush_cache()
            assert engine.memory.allocator.num_free == engine.memory.allocator.num_pages


def joined(outputs: list[RequestOutput]) -> Generation:
    result = Generation([], Finish(""), [], [], None, 0)
    for output in outputs:
        assert not result.finish.reason, "output after the end"
        result.token_ids += output.token_ids
        result.cached_tokens = max(result.cached_tokens, output.cached_tokens)
        result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs
        if output.logprobs is not None:
            result.logprobs += output.logprobs.logprobs
            result.top_logprobs += output.logprobs.top
        result.finish = output.finish or result.finish
    return result


@contextmanager
def pair_of(
    model: str,
    backend: str = "tcp",
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
    **both: object,
) -> Iterator[Pair]:
    """Engines of one model; `prefill` and `decode` are settings of one side, `both` of both."""
    base: dict[str, object] = {
        "model_path": model,
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 4096,
        "num_threads": 1,
        "log_level": "error",
        "disaggregation_transfer_backend": backend,
        "disaggregation_bootstrap_timeout": 60.0,
        "disaggregation_waiting_timeout": 60.0,
        "disaggregation_heartbeat_failures": 30,
        "num_reserved_decode_tokens": 32,
        **both,
    }
    server = BootstrapServer("127.0.0.1", 0)
    engines = []
    try:
        address = HandOverAddress(server.address, "127.0.0.1", "first")
        settings = {**base, "disaggregation_mode": "prefill", **(prefill or {})}
        engines.append(Engine(EngineConfig(**settings), address))  # type: ignore[arg-type]
        settings = {**base, "disaggregation_mode": "decode", **(decode or {})}
        engines.append(Engine(EngineConfig(**settings)))  # type: ignore[arg-type]
        yield Pair(engines[0], engines[1], server)
    finally:
        for engine in reversed(engines):
            engine.close()
        server.close()


def wait_for_state(pair: Pair, rid: str, state: str, seconds: float = 60.0) -> None:
    """Steps until the request is in the state of this name on the side that has such a state."""
    limit = time.monotonic() + seconds
    while True:
        for engine in (pair.prefill, pair.decode):
            request = engine.scheduler.requests.get(rid)
            if request is not None and request.state.value == state:
                return
        pair.step()
        assert time.monotonic() < limit, f"{rid} was never {state}"
