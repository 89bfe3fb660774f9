"""Health, metrics, information, tokenizing, aborts and the cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from scheduler.messages import ControlReply, LoadReport, SamplingParams
from server.bootstrap_fields import PROBE
from server.errors import ApiError, bad_field
from server.generation import Prompt
from server.http_common import json_response
from server.metrics import CONTENT_TYPE
from server.native_protocol import AbortBody, DetokenizeBody, TokenizeBody
from server.service import Sample, Service, new_rid
from server.validation import OutputOptions, check_abort, check_ids, check_model, check_prompt_count, decode_prompts

_CONTROL_TIMEOUT = 30.0
_HAND_OVER_QUEUES = ("bootstrapping_requests", "sending_requests", "connecting_requests", "receiving_requests")
# Generation refuses what is too long for the model before it is tokenized; here this bounds the work.
MAX_TOKENIZE_CHARACTERS = 8 << 20

_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)
_abort_decoder = msgspec.json.Decoder(AbortBody)


def create_router(service: Service) -> APIRouter:
    router = APIRouter()
    _add_probes(router, service)
    _add_reports(router, service)
    _add_tokenizing(router, service)
    _add_commands(router, service)
    return router


def _add_probes(router: APIRouter, service: Service) -> None:
    client, config = service.client, service.config

    @router.get("/health")
    async def health() -> Response:
        """200 when every rank answers within --health-timeout."""
        await _ask(service, "ping", config.health_timeout)
        return json_response({"status": "ok"})

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """200 when the engine makes a token within --health-timeout, for this request or another."""
        engine = client.check_accepting()
        token = engine.eos_token_ids[0] if engine.eos_token_ids else 0
        params = SamplingParams(max_new_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
        sample = Sample(Prompt([token]), params, OutputOptions())
        run = service.start(request, PROBE, [new_rid("health")], [sample], time.monotonic(), "prompt")
        signs = [run.finish(), client.wait_tokens()]
        if any(_waits_for_peers(report) for report in client.load_reports):
            signs.append(_answers(service))
        try:
            with run:
                async with asyncio.timeout(config.health_timeout):
                    await _first_success(signs)
        except TimeoutError as error:
            raise _no_answer(config.health_timeout) from error
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken. Routers must know the role, and that two servers they join can meet."""
        engine = client.check_accepting()
        mode = config.engine.disaggregation_mode
        return json_response({"status": "ready", "disaggregation_mode": mode, "hand_over": engine.hand_over})


def _add_reports(router: APIRouter, service: Service) -> None:
    client, config = service.client, service.config

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def server_info() -> Response:
        settings = msgspec.to_builtins(config)
        del settings["parent_link"]
        settings["api_key"] = None if config.api_key is None else "***"
        settings |= settings.pop("engine")
        settings["outputs_are_meaningful"] = config.outputs_are_meaningful
        states: list[dict[str, Any]] = []
        if client.engine is not None:
            states = [reply.state for reply in await _ask(service, "state", config.health_timeout)]
        engine = None if client.engine is None else msgspec.structs.asdict(client.engine)
        return json_response(settings | {"engine": engine, "internal_states": states})

    async def model_info() -> Response:
        engine = client.engine
        return json_response(
            {
                "model_path": config.engine.model_path,
                "tokenizer_path": config.tokenizer_path or config.engine.model_path,
                "served_model_name": config.served_model_name,
                "is_generation": True,
                "context_length": None if engine is None else engine.context_length,
                "vocab_size": None if engine is None else engine.vocab_size,
                "dtype": None if engine is None else engine.dtype,
                "eos_token_ids": [] if engine is None else engine.eos_token_ids,
                "sampling_defaults": msgspec.to_builtins(service.defaults),
                "has_chat_template": service.tokenizer.chat_template is not None,
            }
        )

    async def get_load() -> Response:
        return json_response([_load(report) for report in client.load_reports])

    async def loads() -> Response:
        return json_response({"timestamp": time.time(), "loads": [_load(report) for report in client.load_reports]})

    _add(router, server_info, ("/server_info", "/get_server_info"), ["GET"])
    _add(router, model_info, ("/model_info", "/get_model_info"), ["GET"])
    _add(router, get_load, ("/get_load",), ["GET"])
    _add(router, loads, ("/v1/loads",), ["GET"])


def _add_tokenizing(router: APIRouter, service: Service) -> None:
    client, config = service.client, service.config

    async def tokenize(request: Request) -> Response:
        body = await service.read(request, _tokenize_decoder)
        check_model(body.model, config.served_model_name)
        text = body.prompt if body.prompt is not None else body.text
        if text is None:
            raise bad_field("prompt", "is missing")
        texts = [text] if isinstance(text, str) else text
        check_prompt_count(len(texts), "prompt")
        length = sum(map(len, texts))
        if length > MAX_TOKENIZE_CHARACTERS:
            raise bad_field("prompt", f"has {length} characters; at most {MAX_TOKENIZE_CHARACTERS} are tokenized")
        batch = await service.encode(texts, add_special=body.add_special_tokens is not False)
        counts = [len(ids) for ids in batch]
        engine = client.engine
        one = isinstance(text, str)
        return json_response(
            {
                "tokens": batch[0] if one else batch,
                "count": counts[0] if one else counts,
                "max_model_len": None if engine is None else engine.context_length,
            }
        )

    async def detokenize(request: Request) -> Response:
        body = await service.read(request, _detokenize_decoder)
        check_model(body.model, config.served_model_name)
        field = "tokens" if bytes(body.tokens).strip() != b"null" else "token_ids"
        raw: msgspec.Raw = getattr(body, field)
        if bytes(raw).strip() in (b"[]", b"null"):
            if bytes(raw).strip() == b"null":
                raise bad_field("tokens", "is missing")
            return json_response({"text": "", "prompt": ""})
        batch, is_batch = decode_prompts(raw, field)
        texts = []
        skip = body.skip_special_tokens is not False
        size = service.tokenizer.vocab_size if client.engine is None else client.engine.vocab_size
        for ids in batch:
            if isinstance(ids, str):
                raise bad_field(field, "must be token ids")
            check_ids(ids, max(size, service.tokenizer.vocab_size), field)
            texts.append(
                await service.in_thread(partial(service.tokenizer.decode, ids, skip_special_tokens=skip), len(ids))
            )
        shown = texts if is_batch else texts[0]
        return json_response({"text": shown, "prompt": shown})

    _add(router, tokenize, ("/tokenize", "/v1/tokenize"), ["POST"])
    _add(router, detokenize, ("/detokenize", "/v1/detokenize"), ["POST"])


def _add_commands(router: APIRouter, service: Service) -> None:
    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await service.read(request, _abort_decoder)
        check_abort(body)
        client = service.client
        count = client.abort_all() if body.abort_all else client.abort(body.rid or "")
        return json_response({"aborted": count})

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        for reply in await _ask(service, "flush_cache", _CONTROL_TIMEOUT):
            if not reply.ok:
                raise ApiError(400, f"rank {reply.rank}: {reply.message}", code="busy")
        return json_response({"message": "the prefix cache is empty"})


def _add(router: APIRouter, endpoint: Callable[..., Any], paths: Iterable[str], methods: list[str]) -> None:
    for path in paths:
        router.add_api_route(path, endpoint, methods=methods)


def _no_answer(timeout: float) -> ApiError:
    return ApiError(503, f"the engine has not answered for {timeout:g} s", code="engine_not_answering")


async def _ask(service: Service, kind: str, timeout: float) -> list[ControlReply]:
    try:
        return await service.client.control(kind, timeout)
    except TimeoutError as error:
        raise _no_answer(timeout) from error


async def _answers(service: Service) -> None:
    await _ask(service, "ping", service.config.health_timeout)


def _waits_for_peers(report: LoadReport) -> bool:
    """Memory may be held by requests whose other half is late, so that this server can do nothing and is sound."""
    return any(getattr(report, name) > 0 for name in _HAND_OVER_QUEUES)


async def _first_success(signs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Returns when one of them has. One that is refused because the server is busy (503) leaves it to the others."""
    tasks = {asyncio.create_task(sign) for sign in signs}
    try:
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return
                if not isinstance(error, ApiError) or error.status != 503:
                    raise error
    finally:
        for task in tasks:
            task.cancel()


def _load(report: LoadReport) -> dict[str, Any]:
    hand_over = {name: getattr(report, name) for name in _HAND_OVER_QUEUES}
    waiting = report.waiting_requests + sum(hand_over.values())
    return {
        "dp_rank": report.rank,
        "num_reqs": report.running_requests + waiting,
        "num_running_reqs": report.running_requests,
        "num_waiting_reqs": waiting,
        "num_waiting_tokens": report.waiting_tokens,
        "num_tokens": report.used_tokens + report.waiting_tokens,
        "num_used_tokens": report.used_tokens,
        "max_total_num_tokens": report.total_tokens,
        "token_usage": report.used_tokens / report.total_tokens if report.total_tokens else 0.0,
        "gen_throughput": report.generation_throughput,
        "cache_hit_rate": report.cache_hit_rate,
        **{f"num_{name}": count for name, count in hand_over.items()},
    }
