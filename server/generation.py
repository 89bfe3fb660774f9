"""One HTTP request's samples under way: the engine's outputs turned into text, counts and log probabilities."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from starlette.types import Receive

from scheduler.messages import Finish, GenerateRequest, RequestOutput, TokenLogprobs
from server.detokenizer import Detokenizer
from server.engine_client import EngineClient
from server.errors import CLIENT_GONE, ApiError
from server.metrics import Metrics
from server.stop_strings import StopMatcher
from server.tokenizer import Tokenizer
from server.validation import OutputOptions

# JSON has no infinity; OpenAI's API shows impossible tokens so.
_LOWEST_LOGPROB = -9999.0


class TokenEntry(NamedTuple):
    """A token and its log probability.

    data: bytes the token adds to the text. offset: characters of the sample's text before it. ends_text: a stop token
    that is not part of the text. logprob: None for the first token of a prompt.
    """

    token_id: int
    data: bytes
    offset: int
    logprob: float | None
    top: list[tuple[int, float]]
    ends_text: bool = False


@dataclass(frozen=True)
class Prompt:
    """token_ids: at least one. text: None when the client sent ids."""

    token_ids: list[int]
    text: str | None = None


class Choice:
    """One sample.

    token_ids: all that count, a stop token too. finish_reason: "stop", "length" or "abort" once it has ended.
    matched: the stop token's id or the stop string that ended it.
    """

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions, index: int, prompt: Prompt) -> None:
        self.index = index
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self.prompt_logprobs: TokenLogprobs | None = None
        self.finish_reason: str | None = None
        self.abort_message = ""
        self.matched: int | str | None = None
        self.last_output = 0.0
        self._options = options
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stops, include_stop=options.include_stop) if options.stops else None
        self._characters = 0
        self._pieces: list[str] = []
        self._entries: list[TokenEntry] = []
        self._num_taken = 0

    def add(self, output: RequestOutput) -> bool:
        """Takes an output in; returns whether a stop string ended the sample, which the engine has to be told.

        ApiError when the engine ended the request because of an error.
        """
        finish = output.finish
        if output.cached_tokens > self.cached_tokens:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if finish is not None and finish.reason == "abort" and finish.status not in (0, CLIENT_GONE):
            raise ApiError(finish.status, finish.message)
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            ends_text = finish is not None and position == last and self._is_hidden_stop(token, finish)
            self.token_ids.append(token)
            if output.logprobs is not None:
                self._add_entry(token, output.logprobs, position, ends_text)
            if not ends_text:
                self._add_text(self._detokenizer.push(token))
                if self._matcher is not None and self._stopped():
                    return finish is None
        if finish is not None:
            self._add_text(self._detokenizer.flush())
            if self._stopped():
                return False
            if self._matcher is not None:
                self._pieces.append(self._matcher.flush())
            self.finish_reason = finish.reason
            if finish.reason == "stop":
                self.matched = finish.matched
            self.abort_message = finish.message
        return False

    def _is_hidden_stop(self, token: int, finish: Finish) -> bool:
        if finish.reason != "stop":
            return False
        return not self._options.include_stop or not self._detokenizer.bytes_of(token)

    def _add_text(self, piece: str) -> None:
        if not piece:
            return
        self._characters += len(piece)
        if self._matcher is not None and len(self.token_ids) > self._options.min_tokens:
            piece = self._matcher.push(piece)
        self._pieces.append(piece)

    def _stopped(self) -> bool:
        if self._matcher is None or self._matcher.matched is None:
            return False
        self.finish_reason = "stop"
        self.matched = self._matcher.matched
        return True

    def _add_entry(self, token: int, logprobs: TokenLogprobs, position: int, ends_text: bool) -> None:
        data = b"" if ends_text else self._detokenizer.bytes_of(token)
        top = logprobs.top[position] if logprobs.top else []
        self._entries.append(
            TokenEntry(token, data, self._characters, finite(logprobs.logprobs[position]), top, ends_text)
        )

    @property
    def num_waiting(self) -> int:
        """Tokens since the last `take_text`."""
        return len(self.token_ids) - self._num_taken

    def take_text(self) -> str:
        """The text since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        self._num_taken = len(self.token_ids)
        return text

    def take_entries(self) -> list[TokenEntry]:
        """The log probabilities since the last call; empty when none were asked for."""
        entries, self._entries = self._entries, []
        return entries


def finite(logprob: float | None) -> float | None:
    """A log probability that JSON can carry."""
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)


class Run:
    """All samples of one HTTP request. Used as a context manager, it ends what still runs.

    choices: in the order of the requests given to `start`. arrived: `time.monotonic()` when the request came.
    """

    def __init__(self, client: EngineClient, choices: Sequence[Choice], metrics: Metrics, arrived: float) -> None:
        self.choices = choices
        self.arrived = arrived
        self.first_token: float | None = None
        self._client = client
        self._metrics = metrics
        self._num_running = len(choices)
        self._watcher: asyncio.Task[None] | None = None

    def start(
        self,
        rid: str,
        names: Sequence[str],
        requests: Sequence[GenerateRequest],
        receive: Receive,
        dp_rank: int | None = None,
    ) -> None:
        """Sends the samples to the engine and watches for the client to leave. ApiError when they are not taken.

        rid: what the answer calls the whole. names: what /abort_request calls each sample. dp_rank: who is to work on
        them, None for whichever the load balancing chooses.
        """
        self.rid = rid
        self._generation = self._client.submit(names, requests, dp_rank)
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ApiError(CLIENT_GONE, "the client closed the connection"))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is None:
            return
        self._watcher.cancel()
        self._client.release(self._generation)
        failure = "abort" if isinstance(error, ApiError) and error.status == CLIENT_GONE else "error"
        for choice in self.choices:
            self._metrics.finished(choice.finish_reason or failure, len(choice.prompt.token_ids), len(choice.token_ids))
        self._metrics.request_seconds.observe(time.monotonic() - self.arrived)

    @property
    def done(self) -> bool:
        return self._num_running == 0

    async def advance(self) -> list[Choice]:
        """Waits for outputs; returns the samples that got any, each once. ApiError when one cannot go on."""
        return self._add(await self._generation.outputs())

    async def drive(self, handle: Callable[[list[Choice]], None]) -> None:
        """Calls `handle` with the samples that got outputs, each once, as soon as they arrive, until all have ended.

        ApiError when one cannot go on; whatever `handle` raises.
        """
        if self.done:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_outputs() -> None:
            if ended.done():
                return
            try:
                outputs = self._generation.take()
                if outputs:
                    handle(self._add(outputs))
            except Exception as error:
                ended.set_exception(error)
            else:
                if self.done:
                    ended.set_result(None)

        self._generation.listener = on_outputs
        on_outputs()  # for what came before there was somebody to tell
        try:
            await ended
        finally:
            self._generation.listener = None

    def _add(self, outputs: Sequence[tuple[int, RequestOutput]]) -> list[Choice]:
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now
            self._metrics.first_token_seconds.observe(now - self.arrived)
        touched: dict[int, Choice] = {}
        for index, output in outputs:
            choice = self.choices[index]
            if choice.finish_reason is not None:
                continue
            if choice.last_output and output.token_ids:
                self._metrics.inter_token_seconds.observe((now - choice.last_output) / len(output.token_ids))
            choice.last_output = now
            touched[index] = choice
            if choice.add(output):
                self._generation.abort_sample(index)
            if choice.finish_reason is not None:
                self._num_running -= 1
        return list(touched.values())

    async def finish(self) -> None:
        """Waits for all samples to end."""
        while not self.done:
            await self.advance()

    def usage(self) -> dict[str, object]:
        """OpenAI's token counts; a prompt with several samples counts once."""
        prompts = {id(choice.prompt): choice for choice in reversed(self.choices)}
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in prompts.values())
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in prompts.values())},
        }
