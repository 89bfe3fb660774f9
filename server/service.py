"""What the endpoints share: settings, the engine, the tokenizer, and the way from a body to running samples."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Request

from scheduler.messages import GenerateRequest, RankReady, SamplingParams
from server.bootstrap_fields import BootstrapFields, bootstraps, check_rooms_lead_to, routed_dp_rank
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import ApiError, bad_field
from server.generation import Choice, Prompt, Run
from server.metrics import Metrics
from server.request_body import read_body
from server.tokenizer import Tokenizer
from server.validation import (
    MAX_SAMPLES,
    OutputOptions,
    SamplingDefaults,
    check_ids,
    decode_body,
    new_token_limit,
    with_seed,
)

# Shorter texts take less time to tokenize than to hand to another thread and back.
_INLINE_CHARACTERS = 1000
_ENCODE_THREADS = 4
# Lists of texts are tokenized in parts of about so many characters, a few tens of milliseconds each.
_TURN_CHARACTERS = 50_000

# Of a decode server, which has the last word on what it can hold.
_MOST_TOKENS_ELSEWHERE = 2**31 - 1

_T = TypeVar("_T")


class Sample(msgspec.Struct, frozen=True):
    """What is wanted of one prompt: `n` samples, each with these parameters.

    params.seed is the request's; each sample gets its own. The rest as in GenerateRequest.
    """

    prompt: Prompt
    params: SamplingParams
    options: OutputOptions
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_start: int = -1


class Service:
    """Shared by all endpoints of one application."""

    def __init__(
        self, config: ServerConfig, client: EngineClient, tokenizer: Tokenizer, defaults: SamplingDefaults
    ) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.metrics = Metrics(client, config.engine.disaggregation_mode)
        self._is_prefill = config.engine.disaggregation_mode == "prefill"
        self.started = int(time.time())
        self._threads = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: Request, decoder: msgspec.json.Decoder[_T]) -> _T:
        """The decoded body. ApiError 413 when it is too long, 408 when it does not come, 400 when it does not fit."""
        config = self.config
        return decode_body(decoder, await read_body(request, config.max_request_bytes, config.request_read_timeout))

    async def in_thread(self, function: Callable[[], _T], characters: int) -> _T:
        """Runs `function`, in another thread when the text it works on is long."""
        if characters <= _INLINE_CHARACTERS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def prompts(
        self, prompts: Sequence[str] | Sequence[list[int]], engine: RankReady, field: str, *, add_special: bool = True
    ) -> list[Prompt]:
        """Tokenizes texts and checks ids. ApiError 400 for empty prompts and for what cannot fit the context."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check_length(text, engine, field)
        encoded = iter(await self.encode(texts, add_special=add_special))
        done = []
        for prompt in prompts:
            if isinstance(prompt, str):
                done.append(Prompt(next(encoded), prompt))
            else:
                check_ids(prompt, engine.vocab_size, field)
                done.append(Prompt(prompt))
            if not done[-1].token_ids:
                raise bad_field(field, "is empty: a prompt needs at least one token")
        return done

    async def encode(self, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
        """Long lists take turns with what other requests have to tokenize."""
        encode = self.tokenizer.encode
        encoded: list[list[int]] = []
        for part in _turns(texts):
            work = partial(_encode_each, partial(encode, add_special_tokens=add_special), part)
            encoded += await self.in_thread(work, sum(map(len, part)))
        return encoded

    def _check_length(self, text: str, engine: RankReady, field: str) -> None:
        # Tokenizing what is certainly too long would only keep a core busy.
        least = len(text) // self.tokenizer.longest_token
        if least > engine.context_length:
            message = (
                f"This model's maximum context length is {engine.context_length} tokens. However, {field} has "
                f"{len(text)} characters, which are at least {least} tokens. Please shorten it."
            )
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    def new_token_limit(
        self,
        requested: int | None,
        default: int | None,
        prompt: Prompt,
        engine: RankReady,
        *,
        field: str,
        prompt_field: str,
        minimum: int = 1,
    ) -> int:
        """As validation.new_token_limit. A prefill server needs room for one token only: the others are elsewhere."""
        length, context = len(prompt.token_ids), engine.context_length
        if self._is_prefill and requested is not None and requested > 1:
            new_token_limit(None, 1, length, context, field=field, prompt_field=prompt_field)
            return min(requested, _MOST_TOKENS_ELSEWHERE)
        return new_token_limit(
            requested, default, length, context, field=field, prompt_field=prompt_field, minimum=minimum
        )

    def start(
        self,
        request: Request,
        body: BootstrapFields,
        rids: Sequence[str],
        samples: Sequence[Sample],
        arrived: float,
        field: str,
    ) -> Run:
        """Sends everything to the engine. Choices are numbered prompt by prompt, as OpenAI does.

        rids: one name for the whole, or one a prompt.
        """
        total = sum(sample.n for sample in samples)
        if total > MAX_SAMPLES:
            raise bad_field(field, f"times n makes {total} samples; at most {MAX_SAMPLES} are allowed")
        rooms = bootstraps(body, [sample.n for sample in samples], self.config)
        dp_rank = routed_dp_rank(body, self.client.num_ranks)
        if self._is_prefill and dp_rank is not None:
            check_rooms_lead_to(dp_rank, rooms, self.client.num_ranks)
        choices: list[Choice] = []
        names: list[str] = []
        requests: list[GenerateRequest] = []
        for index, sample in enumerate(samples):
            names += [rids[index % len(rids)]] * sample.n
            for number in range(sample.n):
                bootstrap = rooms[len(choices)]
                choices.append(Choice(self.tokenizer, self._options(sample), len(choices), sample.prompt))
                requests.append(
                    GenerateRequest(
                        rid="",
                        input_ids=sample.prompt.token_ids,
                        sampling=with_seed(sample.params, number),
                        logprobs=sample.logprobs,
                        top_logprobs=sample.top_logprobs,
                        prompt_logprobs_start=sample.prompt_logprobs_start,
                        bootstrap=bootstrap,
                    )
                )
        run = Run(self.client, choices, self.metrics, arrived)
        run.start(rids[0], names, requests, request.receive, dp_rank)
        return run

    def _options(self, sample: Sample) -> OutputOptions:
        if not self._is_prefill:
            return sample.options
        # Whether the one token completes a stop string is for the decode side to see.
        return msgspec.structs.replace(sample.options, stops=())


def _turns(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    start = characters = 0
    for end, text in enumerate(texts, 1):
        characters += len(text)
        if characters >= _TURN_CHARACTERS:
            yield texts[start:end]
            start, characters = end, 0
    if start < len(texts):
        yield texts[start:]


def _encode_each(encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int]]:
    return [encode(text) for text in texts]


def new_rid(kind: str) -> str:
    """kind: "chatcmpl" and so on, the beginning of an OpenAI response id."""
    return f"{kind}-{uuid.uuid4().hex}"
