"""Throughput of the engine in this process, without HTTP, tokenizer or a second process.

    python benchmarks/engine.py --num-requests 8 --input-len 156 --output-len 64
    python benchmarks/engine.py --workload mixed256 --model-path FOLDER --load-format dummy --temperature 0.6

Every flag of launch.py about model, device, memory and scheduling works here too. All requests are submitted at once,
or so that --concurrency of them are in flight. `--output-len 1` measures prefill alone. Prompts are token ids, answers
go on to their full length, and the prefix cache is emptied before each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import torch

from benchmarks import cpu_ceiling
from benchmarks._machine import MachineLoad, process_age
from benchmarks._stats import RequestRecord, format_summary, summarize
from benchmarks._workload import LengthRange, WorkItem, make_workload, parse_length
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import GenerateRequest, SamplingParams
from server import arguments, default_model
from server.config import StartupError

# (requests, prompt lengths, output lengths), seed 0: known workloads by name.
WORKLOADS = {"mixed256": (256, LengthRange(100, 1024), LengthRange(100, 1024))}
_WARMUP_SEED = 1_000_003


def run_workload(
    engine: Engine,
    items: list[WorkItem],
    *,
    concurrency: int | None = None,
    temperature: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Submits the items (`concurrency` at a time; None: all at once) and steps until they are done.

    A token's time is the end of the step that made it known.
    """
    limit = concurrency or len(items)
    records: dict[str, RequestRecord] = {}
    submitted = in_flight = 0

    def submit_more() -> None:
        nonlocal submitted, in_flight
        while submitted < len(items) and in_flight < limit:
            item, rid = items[submitted], str(submitted)
            records[rid] = RequestRecord(submitted, clock(), input_tokens=len(item.prompt_ids))
            sampling = SamplingParams(item.output_len, seed=submitted, temperature=temperature, ignore_eos=True)
            engine.submit(GenerateRequest(rid, item.prompt_ids, sampling))
            submitted += 1
            in_flight += 1

    submit_more()
    while in_flight:
        outputs = engine.step()
        now = clock()
        for output in outputs:
            record = records[output.rid]
            if output.token_ids:
                record.output_tokens += len(output.token_ids)
                record.token_times.append(now)
            if output.finish is not None:
                record.end = now
                in_flight -= 1
                if output.finish.reason == "abort":
                    record.error, record.error_message = "abort", output.finish.message
        submit_more()
    while not engine.is_idle:
        engine.step()
    return list(records.values())


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, EngineConfig]:
    """This program's flags and, from the rest, the engine's. StartupError for wrong ones of the latter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="instead of the next three")
    parser.add_argument("--num-requests", type=int, default=8, help="default %(default)s")
    parser.add_argument("--input-len", type=parse_length, default="156", help="N or LOW:HIGH; default %(default)s")
    parser.add_argument("--output-len", type=parse_length, default="64", help="N or LOW:HIGH; default %(default)s")
    parser.add_argument("--concurrency", type=int, help="requests in flight; by default all at once")
    parser.add_argument("--max-token-id", type=int, default=10000, help="of prompts; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths; default %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default %(default)s")
    parser.add_argument("--warmup", type=int, default=1, help="runs before the measured ones; default %(default)s")
    parser.add_argument("--repeat", type=int, default=1, help="measured runs; default %(default)s")
    parser.add_argument("--linear-ceiling", action="store_true", help="time the linear layers alone beside each run")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--label", default="", help="name of the run in the results")
    args, engine_flags = parser.parse_known_args(argv)
    for name in ("num_requests", "max_token_id", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is below 1")
    if args.warmup < 0 or (args.concurrency is not None and args.concurrency < 1):
        parser.error("--warmup is below 0 or --concurrency below 1")
    config = arguments.parse(engine_flags).engine
    if config.model_path == default_model.NAME:
        config = msgspec.structs.replace(config, model_path=str(default_model.ensure()))
    return args, config


def run(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Loads the engine, measures, prints each run, and returns the results."""
    loading = time.perf_counter()
    engine = Engine(config)
    if args.linear_ceiling and engine.device.type != "cpu":
        raise StartupError("--linear-ceiling is for the CPU: leave it out, or use --device cpu")
    start_seconds = {"engine": round(time.perf_counter() - loading, 3)}
    if (age := process_age()) is not None:
        start_seconds["process"] = round(age, 3)
    num_requests, input_len, output_len = args.num_requests, args.input_len, args.output_len
    if args.workload is not None:
        num_requests, input_len, output_len = WORKLOADS[args.workload]
    max_token_id = min(args.max_token_id, engine.info.vocab_size - 1)
    items = make_workload(num_requests, input_len, output_len, max_token_id, args.seed)
    warmup_items = make_workload(num_requests, input_len, output_len, max_token_id, args.seed + _WARMUP_SEED)
    options = {"concurrency": args.concurrency, "temperature": args.temperature}
    for _ in range(args.warmup):
        run_workload(engine, warmup_items, **options)
    runs = []
    for _ in range(args.repeat):
        engine.scheduler.flush_cache()
        streams = args.concurrency or num_requests
        # Before and after the run, because other work on the machine comes and goes.
        ceilings = [cpu_ceiling.tokens_per_second(config.model_path, streams)] if args.linear_ceiling else []
        load = MachineLoad()
        records = run_workload(engine, items, **options)
        summary = summarize(records) | {"machine": load.report()}
        print(format_summary(summary))
        if ceilings:
            ceilings.append(cpu_ceiling.tokens_per_second(config.model_path, streams))
            ceiling = statistics.harmonic_mean(ceilings)
            summary["linear_ceiling_tokens_per_s"] = round(ceiling, 3)
            share = (summary["decode_tokens_per_s"] or 0.0) / ceiling
            print(f"linear ceiling    {ceiling:.1f} tokens/s; decoding reaches {share:.0%} of it")
        runs.append(summary)
    print("start             " + ", ".join(f"{seconds:.1f} s {part}" for part, seconds in start_seconds.items()))
    if len(runs) > 1:
        median = statistics.median(summary["output_tokens_per_s"] for summary in runs)
        print(f"median of {len(runs)} runs   {median:.1f} output tokens/s")
    return {
        "label": args.label,
        "config": msgspec.to_builtins(config),
        "workload": {
            "num_requests": num_requests,
            "input_len": str(input_len),
            "output_len": str(output_len),
            "concurrency": args.concurrency,
            "max_token_id": max_token_id,
            "seed": args.seed,
            "temperature": args.temperature,
        },
        "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "max_total_tokens": engine.memory.total_tokens,
        "start_seconds": start_seconds,
        "runs": runs,
    }


def main(argv: list[str] | None = None) -> int:
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        args, config = parse_args(argv)
        results = run(args, config)
    except (StartupError, ValueError) as error:
        print(f"engine.py: {error}", file=sys.stderr)
        return 2
    if args.output is not None:
        args.output.write_text(json.dumps({"started_at": started_at, **results}, indent=2) + "\n")
    return 1 if any(summary["failed"] for summary in results["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
