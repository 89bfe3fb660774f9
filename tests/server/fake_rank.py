"""A rank that needs no model: real sockets and messages, in a thread, with tokens that follow from the prompt.

Sample text is scripted: `script(request)` gives the token ids that the "model" would choose; after them comes the
end-of-sequence token. The default script repeats the prompt for ever.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import zmq

from scheduler.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    Finish,
    GenerateRequest,
    Inbound,
    LoadReport,
    Outbound,
    RankReady,
    RequestOutput,
    StepOutput,
    TokenLogprobs,
    decode_inbound,
    encode,
)
from server.engine_client import EngineClient

CONTEXT_LENGTH = 512
VOCAB_SIZE = 320  # more than the byte tokenizer has: the rest has no text
EOS = 257

Script = Callable[[GenerateRequest], Iterator[int]]


def repeat_prompt(request: GenerateRequest) -> Iterator[int]:
    return itertools.cycle(request.input_ids)


def logprob_of(token: int) -> float:
    return -(token % 50) / 10 - 0.1


class _Sample:
    def __init__(self, request: GenerateRequest, tokens: Iterator[int]) -> None:
        self.request = request
        self.tokens = tokens
        self.count = 0

    def step(self) -> RequestOutput:
        request, params = self.request, self.request.sampling
        ids: list[int] = []
        finish = None
        if params.max_new_tokens > 0:
            token = next(self.tokens, EOS)
            ids = [token]
            if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
                finish = Finish("stop", matched=token)
        first = self.count == 0
        self.count += 1
        if finish is None and self.count >= params.max_new_tokens:
            finish = Finish("length")
        return RequestOutput(
            request.rid,
            ids,
            finish,
            logprobs=_logprobs(ids, request.top_logprobs) if request.logprobs and ids else None,
            prompt_logprobs=_prompt_logprobs(request) if first and request.prompt_logprobs_start >= 0 else None,
        )


def _top(token: int, count: int) -> list[tuple[int, float]]:
    return [((token + 1 + index) % 256, -0.01 - index) for index in range(count)]


def _logprobs(ids: list[int], top: int) -> TokenLogprobs:
    return TokenLogprobs(ids, [logprob_of(token) for token in ids], [_top(token, top) for token in ids])


def _prompt_logprobs(request: GenerateRequest) -> TokenLogprobs:
    start = request.prompt_logprobs_start
    found = _logprobs(request.input_ids[start:], request.top_logprobs)
    if start == 0:
        found.logprobs[0] = None
        found.top[0] = []
    return found


class FakeRank:
    """Runs from construction until `close`. `hold` keeps back steps that are not allowed; `mute` keeps replies back.

    num_samples: those that run or wait; it changes once all has been sent that a message or a step gave rise to.
    """

    def __init__(
        self, client: EngineClient, script: Script = repeat_prompt, *, rank: int = 0, max_running: int = 1000
    ) -> None:
        self.script = script
        self.hold = threading.Event()
        self.mute = threading.Event()
        self.received: list[Inbound] = []
        self.aborted: list[str] = []
        self.steps = 0
        self.num_samples = 0
        self.queues: dict[str, int] = {}  # further fields of its load reports
        self.finish_next: Finish | None = None
        self._allowed = threading.Semaphore(0)
        self._rank = rank
        self._max_running = max_running
        self._addresses = (client.inbound_addresses[rank], client.outbound_address)
        self._running: dict[str, _Sample] = {}
        self._waiting: dict[str, _Sample] = {}
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop = True
        self._thread.join(60)

    def allow(self, steps: int) -> None:
        """So many steps are made in spite of `hold`."""
        self._allowed.release(steps)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as inbound, context.socket(zmq.PUSH) as self._out:
            inbound.connect(self._addresses[0])
            self._out.connect(self._addresses[1])
            self._send(RankReady(self._rank, 4096, 64, CONTEXT_LENGTH, VOCAB_SIZE, [EOS], "float32", "cpu", 0.1))
            while not self._stop:
                free = self.num_samples and not self.hold.is_set()
                if inbound.poll(1 if free else 5):
                    self._handle(decode_inbound(inbound.recv()))
                elif free or (self.num_samples and self._allowed.acquire(blocking=False)):
                    self._step()
                self.num_samples = len(self._running) + len(self._waiting)

    def _handle(self, message: Inbound) -> None:
        self.received.append(message)
        if isinstance(message, GenerateRequest):
            self._waiting[message.rid] = _Sample(message, self.script(message))
        elif isinstance(message, AbortRequest):
            self._abort(message)
        elif isinstance(message, ControlRequest) and not self.mute.is_set():
            state: dict[str, str | int | float | bool | None] = {"steps": self.steps} if message.kind == "state" else {}
            ok = message.kind != "flush_cache" or self.num_samples == 0
            text = "" if ok else "requests are running"
            self._send(ControlReply(message.id, self._rank, ok, text, state))

    def _abort(self, message: AbortRequest) -> None:
        found = self._running.pop(message.rid, None) or self._waiting.pop(message.rid, None)
        if found is not None:
            self.aborted.append(message.rid)
            self._publish([RequestOutput(message.rid, [], Finish("abort", message="aborted", status=499))])

    def _step(self) -> None:
        self.steps += 1
        while self._waiting and len(self._running) < self._max_running:
            rid = next(iter(self._waiting))
            self._running[rid] = self._waiting.pop(rid)
        if self.finish_next is not None:
            outputs = [RequestOutput(rid, [], self.finish_next) for rid in self._running]
            self.finish_next = None
        else:
            outputs = [sample.step() for sample in self._running.values()]
        for output in outputs:
            if output.finish is not None:
                del self._running[output.rid]
        self._publish(outputs)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        load = LoadReport(
            rank=self._rank,
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            used_tokens=16 * len(self._running),
            total_tokens=4096,
            **self.queues,
        )
        self._send(StepOutput(self._rank, outputs, load))

    def _send(self, message: Outbound) -> None:
        self._out.send(encode(message))
