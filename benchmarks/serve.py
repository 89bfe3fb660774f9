"""Load generator for OpenAI-compatible servers: time to first token, inter-token latency, tokens a second.

    python benchmarks/serve.py --base-url http://127.0.0.1:30000 --num-requests 64 --concurrency 8 \\
        --input-len 156 --output-len 64 --output run.json --plot run.png

Sends streaming requests either so that --concurrency of them are always in flight, or at Poisson times of
--request-rate a second. --plot needs matplotlib: `pip install -c constraints.txt -e '.[bench]'`.
It ends by itself: after --num-requests requests, or after --max-seconds. Exit status 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._http import Answer, ConnectionFailed, HTTPClient
from benchmarks._machine import MachineLoad
from benchmarks._plot import missing_dependency, plot_run
from benchmarks._stats import RequestRecord, format_summary, summarize
from benchmarks._workload import (
    LengthRange,
    WorkItem,
    make_workload,
    parse_length,
    poisson_arrivals,
    words_for_ids,
)

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Warm-up prompts come from another seed, so that none of the measured ones is in a prefix cache.
_WARMUP_SEED = 1_000_003
# Answers are kept unread until the run is over, or until they take so many bytes.
_UNREAD_BYTES = 1 << 28


class BenchmarkError(Exception):
    """The run cannot start; the message is one line for the person at the keyboard."""


@dataclass(frozen=True)
class ServeOptions:
    """What to send where. Times in seconds.

    model: name to ask for; None takes the first of GET /v1/models. text: prompts as text instead of token ids.
    concurrency: requests in flight; None is unbounded and needs request_rate. request_rate: mean arrivals a second;
    None starts the next request as soon as one ends. Latencies count from when a request was due, so waiting for
    a free place under both limits is part of them.
    ignore_eos: ask the server to go on to the wanted length (an extension that most servers know).
    new_connection: one connection a request, for servers that drop kept-alive connections after a stream.
    """

    base_url: str
    model: str | None = None
    endpoint: str = "completions"
    text: bool = False
    num_requests: int = 64
    concurrency: int | None = 8
    request_rate: float | None = None
    input_len: LengthRange = field(default=LengthRange(156, 156))
    output_len: LengthRange = field(default=LengthRange(64, 64))
    max_token_id: int = 10000
    seed: int = 0
    warmup: int = 2
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    request_timeout: float = 300.0
    max_seconds: float = 1800.0
    new_connection: bool = False


def build_body(options: ServeOptions, model: str, item: WorkItem) -> bytes:
    """The request's JSON."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": item.output_len,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": words_for_ids(item.prompt_ids)}]
    else:
        body["prompt"] = words_for_ids(item.prompt_ids) if options.text else item.prompt_ids
    body.update(options.extra_body)
    return msgspec.json.encode(body)


class StreamReader:
    """Turns bytes of a server-sent event stream into token times, usage and errors of one record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._rest = b""
        self._usage_at: float | None = None
        self._finish_reason: str | None = None
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """`data` arrived at `now`. json errors of a malformed event are recorded, not raised."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def finish(self) -> None:
        """The stream ended: anything short of a finish reason or [DONE] is an error."""
        record = self._record
        if self._usage_at is None:
            record.output_tokens = len(record.token_times)
        if record.error is not None:
            return
        if not self.done and self._finish_reason is None:
            record.error = "incomplete stream"
            record.error_message = f"the stream ended after {len(record.token_times)} pieces without [DONE]"
        elif not record.token_times and self._usage_at is not None and record.output_tokens:
            # Tokens without text, such as ids that a byte-level tokenizer does not spell: only their end was seen.
            record.token_times.append(self._usage_at)
        elif not record.token_times:
            record.error = "no output"
            record.error_message = f"no text before finish reason {self._finish_reason!r}"

    def _event(self, payload: bytes, now: float) -> None:
        record = self._record
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = msgspec.json.decode(payload)
        except msgspec.DecodeError:
            record.error, record.error_message = "malformed event", payload[:200].decode(errors="replace")
            return
        if error := event.get("error"):
            record.error = "error event"
            record.error_message = str(error.get("message", error) if isinstance(error, dict) else error)[:200]
            return
        if usage := event.get("usage"):
            self._usage_at = now
            record.input_tokens = usage.get("prompt_tokens") or record.input_tokens
            record.output_tokens = usage.get("completion_tokens") or 0
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
            if text:
                record.token_times.append(now)
            if reason := choice.get("finish_reason"):
                self._finish_reason = reason


async def exchange(client: HTTPClient, path: str, body: bytes, record: RequestRecord, timeout: float) -> Answer:
    """Sends `body` and waits for all of the answer; failures of any kind end in `record`, as far as they are HTTP's."""
    answer = Answer()
    try:
        async with asyncio.timeout(timeout):
            await client.post(path, body, answer)
    except TimeoutError:
        record.error, record.error_message = "timeout", f"no complete answer within {timeout:g} s"
    except asyncio.CancelledError:
        record.error, record.error_message = "stopped", "still running when the benchmark's time was up"
        raise
    except ConnectionFailed as error:
        record.error, record.error_message = "connection", str(error)[:200]
    finally:
        record.end = time.perf_counter()
    return answer


def read_answer(answer: Answer, record: RequestRecord) -> None:
    """Fills `record` with what the answer says."""
    if record.error is None and answer.status != 200:
        record.error = f"HTTP {answer.status}"
        record.error_message = answer.body.decode(errors="replace")[:200]
        return
    reader = StreamReader(record)
    for now, data in answer.pieces:
        reader.feed(data, now)
    reader.finish()


async def find_model(client: HTTPClient, base_url: str) -> str:
    """Name of the first served model. BenchmarkError when the server does not tell."""
    url = f"{base_url}/v1/models"
    try:
        async with asyncio.timeout(30):
            answer = await client.get("/v1/models")
    except (ConnectionFailed, TimeoutError) as error:
        raise BenchmarkError(f"no answer from {url}: {error or type(error).__name__}; is the server running?") from None
    if answer.status == 200:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return str(json.loads(answer.body)["data"][0]["id"])
    raise BenchmarkError(f"{url} names no model (HTTP {answer.status}); pass --model")


class _Unread:
    """Answers that are to be read when the run is over, or when they have become too many to keep."""

    def __init__(self) -> None:
        self._answers: list[tuple[Answer, RequestRecord]] = []
        self._size = 0

    def add(self, answer: Answer, record: RequestRecord) -> None:
        self._answers.append((answer, record))
        self._size += answer.size
        if self._size > _UNREAD_BYTES:
            self.read()

    def read(self) -> None:
        for answer, record in self._answers:
            read_answer(answer, record)
        self._answers.clear()
        self._size = 0


async def _run_all(
    client: HTTPClient, path: str, bodies: list[bytes], items: list[WorkItem], options: ServeOptions
) -> tuple[list[RequestRecord], int, _Unread]:
    records: list[RequestRecord] = []
    unread = _Unread()
    pending = iter(range(len(bodies)))
    clock = time.perf_counter
    origin = clock()

    async def one(index: int, start: float) -> None:
        record = RequestRecord(index, start, input_tokens=len(items[index].prompt_ids))
        records.append(record)
        unread.add(await exchange(client, path, bodies[index], record, options.request_timeout), record)

    async def keep_busy() -> None:
        for index in pending:
            await one(index, clock())

    async def at_arrival(index: int, due: float, places: asyncio.Semaphore | None) -> None:
        await asyncio.sleep(max(due - clock(), 0.0))
        if places is None:
            await one(index, due)
        else:
            async with places:
                await one(index, due)

    if options.request_rate is None:
        assert options.concurrency is not None
        work = [keep_busy() for _ in range(min(options.concurrency, len(bodies)))]
    else:
        places = asyncio.Semaphore(options.concurrency) if options.concurrency is not None else None
        arrivals = poisson_arrivals(len(bodies), options.request_rate, options.seed)
        work = [at_arrival(index, origin + due, places) for index, due in enumerate(arrivals)]
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    _, late = await asyncio.wait(tasks, timeout=options.max_seconds)
    for task in late:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    return records, len(bodies) - len(records), unread


async def run_benchmark(
    options: ServeOptions, server_pid: int | None = None
) -> tuple[list[RequestRecord], dict[str, Any]]:
    """Warms up, sends everything, and returns the records (in order of start) and the summary.

    BenchmarkError when the server cannot be reached or the warm-up fails.
    """
    headers = {"Content-Type": "application/json"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    base_url = options.base_url.rstrip("/").removesuffix("/v1")
    path = _PATHS[options.endpoint]
    try:
        client = HTTPClient(base_url, headers, new_connection=options.new_connection)
    except ValueError as error:
        raise BenchmarkError(f"--base-url {error}") from None
    try:
        model = options.model or await find_model(client, base_url)
        lengths = (options.input_len, options.output_len, options.max_token_id)
        items = make_workload(options.num_requests, *lengths, options.seed)
        bodies = [build_body(options, model, item) for item in items]
        for index, item in enumerate(make_workload(options.warmup, *lengths, options.seed + _WARMUP_SEED)):
            record = RequestRecord(index, time.perf_counter())
            body = build_body(options, model, item)
            read_answer(await exchange(client, path, body, record, options.request_timeout), record)
            if record.error is not None:
                hint = "; --max-token-id says how far prompt ids go" if "token id" in record.error_message else ""
                raise BenchmarkError(f"warm-up request failed: {record.error}: {record.error_message}{hint}")
        # A collection in the middle of a run would show as latency of the server.
        gc.collect()
        gc.freeze()
        gc.disable()
        load = MachineLoad(server_pid)
        records, not_started, unread = await _run_all(client, path, bodies, items, options)
        machine = load.report()
        gc.enable()
        gc.unfreeze()
        unread.read()
    finally:
        client.close()
    summary = {"model": model, **summarize(records, not_started), "machine": machine}
    return records, summary


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _header_value(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("an HTTP header cannot hold it: it has characters other than printable ASCII")
    return text


def _output_file(text: str) -> Path:
    """Checked before the run, whose results would be lost after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Load generator for OpenAI-compatible servers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:30000", help="where the server listens")
    server.add_argument("--model", help="model name to send; by default the first that the server lists")
    server.add_argument("--endpoint", choices=sorted(_PATHS), default="completions", help="chat implies --text")
    server.add_argument("--api-key", type=_header_value, help="sent as a bearer token")
    server.add_argument("--new-connection", action="store_true", help="one connection a request, no keep-alive")
    server.add_argument(
        "--server-pid", type=_positive, help="process whose tree's CPU use is told apart from other work"
    )
    load = parser.add_argument_group("load")
    load.add_argument("--num-requests", type=_positive, default=64)
    load.add_argument("--concurrency", type=_positive, help="requests in flight; 8 when there is no --request-rate")
    load.add_argument("--request-rate", type=_positive_float, help="Poisson arrivals a second instead of a closed loop")
    load.add_argument("--warmup", type=int, default=2, help="requests sent first, one after another, not measured")
    load.add_argument("--request-timeout", type=_positive_float, default=300.0, help="seconds for one request")
    load.add_argument("--max-seconds", type=_positive_float, default=1800.0, help="seconds for the whole run")
    requests = parser.add_argument_group("requests")
    requests.add_argument("--input-len", type=parse_length, default="156", help="prompt tokens: N, or LOW:HIGH uniform")
    requests.add_argument("--output-len", type=parse_length, default="64", help="output tokens: N, or LOW:HIGH uniform")
    requests.add_argument("--max-token-id", type=_positive, default=10000, help="prompt ids go from 0 to this one")
    requests.add_argument("--text", action="store_true", help="prompts as text, about one token a word, not as ids")
    requests.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of prompts, lengths and arrivals; change it for each run where a prefix cache must not help",
    )
    requests.add_argument("--temperature", type=float, default=0.0)
    requests.add_argument("--no-ignore-eos", action="store_true", help="let answers end early; do not send ignore_eos")
    requests.add_argument("--extra-body", type=_json_object, default="{}", help="JSON object merged into each request")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=_output_file, help="write the results as JSON")
    output.add_argument("--details", action="store_true", help="with --output: every request's times as well")
    output.add_argument("--plot", type=_output_file, help="write a PNG (needs matplotlib)")
    output.add_argument("--label", default="", help="name of the run in the results and the plot")
    args = parser.parse_args(argv)
    if args.warmup < 0:
        parser.error("--warmup is below 0")
    if args.plot is not None and (problem := missing_dependency()):
        parser.error(problem)
    return args


def options_from_args(args: argparse.Namespace) -> ServeOptions:
    concurrency = args.concurrency
    if concurrency is None and args.request_rate is None:
        concurrency = 8
    return ServeOptions(
        base_url=args.base_url,
        model=args.model,
        endpoint=args.endpoint,
        text=args.text or args.endpoint == "chat",
        num_requests=args.num_requests,
        concurrency=concurrency,
        request_rate=args.request_rate,
        input_len=args.input_len,
        output_len=args.output_len,
        max_token_id=args.max_token_id,
        seed=args.seed,
        warmup=args.warmup,
        temperature=args.temperature,
        ignore_eos=not args.no_ignore_eos,
        extra_body=args.extra_body,
        api_key=args.api_key,
        request_timeout=args.request_timeout,
        max_seconds=args.max_seconds,
        new_connection=args.new_connection,
    )


def run_details(records: list[RequestRecord]) -> list[dict[str, Any]]:
    """Each request with times in seconds since the first one was due."""
    origin = min((record.start for record in records), default=0.0)
    details = []
    for record in records:
        entry = asdict(record)
        entry["start"] = round(record.start - origin, 6)
        entry["end"] = round(record.end - origin, 6)
        entry["token_times"] = [round(value - origin, 6) for value in record.token_times]
        details.append(entry)
    return details


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    options = options_from_args(args)
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            records, summary = runner.run(run_benchmark(options, args.server_pid))
    except BenchmarkError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    print(format_summary(summary))
    if args.output is not None:
        config = asdict(options) | {"input_len": str(options.input_len), "output_len": str(options.output_len)}
        config["api_key"] = None if options.api_key is None else "(set)"
        results = {"label": args.label, "started_at": started_at, "config": config, **summary}
        if args.details:
            results["requests"] = run_details(records)
        args.output.write_text(json.dumps(results, indent=2) + "\n")
    if args.plot is not None:
        plot_run(records, summary, args.label or summary["model"], args.plot)
    return 1 if summary["failed"] or summary["not_started"] else 0


if __name__ == "__main__":
    sys.exit(main())
