"""What splitting prefill from decode costs a request, and what the pair reaches: one process beside local mode.

    python benchmarks/hand_over.py --backends tcp nixl --input-len 8 --num-requests 40

Starts one server after the other (one process, then local mode over each backend), sends short requests one at a time
to an idle server and compares the times to first token; then sends --streams at a time and compares tokens a second.
Every engine has one compute thread unless --num-threads says otherwise, so that the prefill server of a pair and the
one process compute at the same speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._server import running_server
from benchmarks._workload import LengthRange
from benchmarks.serve import BenchmarkError, ServeOptions, run_benchmark


def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Times to first token of single requests, and the rates with --streams in flight."""
    short = ServeOptions(
        url,
        num_requests=args.num_requests,
        concurrency=1,
        input_len=LengthRange(args.input_len, args.input_len),
        output_len=LengthRange(4, 4),
        max_token_id=args.max_token_id,
        warmup=5,
    )
    many = ServeOptions(
        url,
        num_requests=4 * args.streams,
        concurrency=args.streams,
        input_len=LengthRange(156, 156),
        output_len=LengthRange(64, 64),
        max_token_id=args.max_token_id,
    )
    _, single = asyncio.run(run_benchmark(short))
    _, loaded = asyncio.run(run_benchmark(many))
    if single["failed"] or loaded["failed"]:
        raise RuntimeError(f"requests failed: {single['errors'] or loaded['errors']}")
    return {
        "ttft_ms": single["ttft_ms"],
        "output_tokens_per_s": loaded["output_tokens_per_s"],
        "loaded_ttft_ms": loaded["ttft_ms"],
        "machine": loaded["machine"],
    }


def run(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measures one server after the other, prints a line for each, and returns the results by name."""
    common = ["--num-threads", str(args.num_threads), *args.server]
    results: dict[str, dict[str, Any]] = {}
    print(f"{'':14}{'TTFT p50':>10}{'more':>9}{'TTFT p90':>10}{f'tok/s at {args.streams}':>14}{'TTFT p50':>11}")
    for name in ["one process", *args.backends]:
        words = common if name == "one process" else [*common, "--disaggregation-transfer-backend", name]
        with running_server(words) as server:
            result = results[name] = measure(server.url, args)
        ttft = result["ttft_ms"]
        more = ttft["p50"] - results["one process"]["ttft_ms"]["p50"]
        print(
            f"{name:14}{ttft['p50']:7.1f} ms{more:6.1f} ms{ttft['p90']:7.1f} ms"
            f"{result['output_tokens_per_s']:14.1f}{result['loaded_ttft_ms']['p50']:8.0f} ms",
            flush=True,
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["tcp"], help="transfer backends of the pairs")
    parser.add_argument("--input-len", type=int, default=8, help="prompt tokens of the single requests")
    parser.add_argument("--num-requests", type=int, default=40, help="single requests")
    parser.add_argument("--streams", type=int, default=8, help="requests in flight for the rates")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--max-token-id", type=int, default=10000, help="prompt ids go from 0 to this one")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("server", nargs="*", help="further arguments of every server, after --")
    args = parser.parse_args()
    try:
        results = run(args)
    except (BenchmarkError, RuntimeError) as error:
        print(f"hand_over.py: {error}", file=sys.stderr)
        return 2
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
