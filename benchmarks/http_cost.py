"""What HTTP, detokenising and a client on the same cores cost a decoding server, measured inside one server.

    python benchmarks/http_cost.py [--streams 64] [--output-len 1400] [any flag of launch.py]

Streams decode while the API process and the client are halted and go on by turns (on, off, off, on), so that both
speeds are of the same machine in the same seconds; the rank says how many tokens it made. The cost is what of the speed
of decoding without them is missing with them. It does not contain reading requests. What piled up while they were
halted is worked off in half a turn before the next one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from benchmarks._machine import MachineLoad
from benchmarks._server import running_server

_SERVE = Path(__file__).resolve().parent / "serve.py"
_INPUT_TOKENS = 20
_ON_OFF = (True, False, False, True)


def tokens_made(url: str) -> int:
    info = httpx.get(f"{url}/server_info", timeout=60).raise_for_status().json()
    return int(info["internal_states"][0]["generated_tokens_total"])


def running_requests(url: str) -> int:
    return int(httpx.get(f"{url}/get_load", timeout=60).raise_for_status().json()[0]["num_running_reqs"])


@contextmanager
def halted(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def speed(url: str, api: int, client: int, seconds: float, on: bool) -> float:
    """Tokens a second of the rank, with the API process and the client or without."""
    made, started = tokens_made(url), time.perf_counter()
    if on:
        time.sleep(seconds)
    else:
        with halted([api, client]):
            time.sleep(seconds)
    return (tokens_made(url) - made) / (time.perf_counter() - started)


def measure(url: str, api: int, args: argparse.Namespace) -> list[float]:
    """The cost in each four of turns, as a share, until the streams end."""
    command = [sys.executable, str(_SERVE), "--base-url", url, "--warmup", "0", "--input-len", str(_INPUT_TOKENS)]
    command += ["--num-requests", str(args.streams), "--concurrency", str(args.streams)]
    command += ["--output-len", str(args.output_len), "--max-token-id", str(args.max_token_id)]
    costs = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as client:
        while client.poll() is None and running_requests(url) < args.streams:
            time.sleep(0.2)
        while True:
            speeds: dict[bool, list[float]] = {True: [], False: []}
            for on in _ON_OFF:
                speeds[on].append(speed(url, api, client.pid, args.seconds, on))
                if client.poll() is not None or running_requests(url) < args.streams:
                    if client.wait():
                        raise RuntimeError(f"the client ended with {client.returncode}: {' '.join(command)}")
                    return costs
                time.sleep(args.seconds / 2)
            running, alone = sum(speeds[True]) / 2, sum(speeds[False]) / 2
            costs.append(1 - running / alone)
            print(f"{len(costs):>4}{alone:>10.0f}{running:>10.0f}{100 * costs[-1]:>8.1f}%", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=1400, help="tokens of each stream; default %(default)s")
    parser.add_argument("--max-token-id", type=int, default=10000, help="of prompts; default %(default)s")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn; default %(default)s")
    args, words = parser.parse_known_args(argv)
    try:
        with running_server(["--disable-radix-cache", *words]) as server:
            load = MachineLoad(os.getpid())
            print(f"{'':>4}{'halted':>10}{'running':>10}{'cost':>9}    tokens/s, {args.streams} streams", flush=True)
            costs = measure(server.url, server.pid, args)
            others = load.report().get("other_cores")
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(costs) < 2:
        print("error: the streams ended too soon: give more --output-len or fewer --seconds", file=sys.stderr)
        return 2
    low, cost, high = (100 * share for share in statistics.quantiles(costs, n=4))
    print(f"cost {cost:.1f}% in the median of {len(costs)} (quartiles {low:.1f}% to {high:.1f}%)")
    if others is not None:
        print(f"other processes kept {others:.2f} of {os.cpu_count()} cores busy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
