"""What HTTP, tokenising, detokenising and a client on the same cores cost an engine, measured inside one server.

    python benchmarks/http_cost.py [--streams 64] [--repeat 8] [any flag of launch.py]

A client sends its requests, all at once, in four runs in a row (alone, over HTTP, over HTTP, alone). For a run alone
the ranks are halted until every request waits at their door; then the API process and the client are halted, and the
ranks work all of it off with the machine to themselves, as an engine without a server does. All runs are of the same
processes within a minute, so a machine whose speed drifts slows both. The cost is the share of the speed alone that
is missing over HTTP, from the first request sent to the last token read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._machine import MachineLoad, cpu_seconds, tree_cpu_seconds_by_process
from benchmarks._server import RunningServer, running_server

_SERVE = Path(__file__).resolve().parent / "serve.py"
# Processes are done when they have used no CPU time for so many seconds.
_STILL = 0.5
_POLL = 0.01
# Of the ranks' work: what may come after a run alone.
_LATE = 0.05
_RUN_TIMEOUT = 600.0


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


@contextmanager
def halted(pids: list[int]) -> Iterator[None]:
    signal_all(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(pids, signal.SIGCONT)


def wait_still(pids: list[int]) -> float:
    """Returns when the processes have stopped using CPU time, with the time (perf_counter) at which they last did."""
    started = last = time.perf_counter()
    used = -1.0
    while (now := time.perf_counter()) - last < _STILL:
        if now - started > _RUN_TIMEOUT:
            raise RuntimeError(f"processes {pids} were still at work after {_RUN_TIMEOUT:g} s")
        if (seconds := sum(map(cpu_seconds, pids))) != used:
            used, last = seconds, now
        time.sleep(_POLL)
    return last


class Comparison:
    """Runs of `streams` requests of `output_len` tokens through one server. words: further arguments of serve.py."""

    def __init__(self, server: RunningServer, streams: int, output_len: int, words: list[str], folder: Path) -> None:
        self._url, self._api = server.url, server.pid
        self._ranks = sorted(tree_cpu_seconds_by_process(server.pid).keys() - {server.pid})
        self._num_tokens = streams * output_len
        self._result = folder / "run.json"
        self._command = [sys.executable, str(_SERVE), "--base-url", server.url, "--text", "--warmup", "0"]
        self._command += ["--num-requests", str(streams), "--concurrency", str(streams)]
        self._command += ["--output-len", str(output_len), "--output", str(self._result), *words]

    @contextmanager
    def _client(self, seed: int) -> Iterator[int]:
        """The process id of a client, which has to succeed."""
        command = [*self._command, "--seed", str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
            try:
                yield client.pid
                printed, _ = client.communicate(timeout=_RUN_TIMEOUT)
            except BaseException:
                client.kill()  # it may wait for ranks that are halted
                raise
        if client.returncode:
            raise RuntimeError(f"the client ended with {client.returncode}: {printed}")

    def over_http(self, seed: int) -> float:
        """Tokens a second."""
        with self._client(seed):
            pass
        return float(json.loads(self._result.read_text())["output_tokens_per_s"])

    def alone(self, seed: int) -> float:
        """Tokens a second. RuntimeError when not every request had reached the ranks before the others were halted."""
        signal_all(self._ranks, signal.SIGSTOP)
        try:
            with self._client(seed) as client:
                others = [self._api, client]
                wait_still(others)
                with halted(others):
                    before, started = self._work(), time.perf_counter()
                    signal_all(self._ranks, signal.SIGCONT)
                    seconds = wait_still(self._ranks) - started
                    done = self._work()
        finally:
            signal_all(self._ranks, signal.SIGCONT)
        if self._work() - done > _LATE * (done - before):
            raise RuntimeError("requests reached the ranks too late: the machine has too much other work")
        return self._num_tokens / seconds

    def _work(self) -> float:
        """CPU seconds of the ranks."""
        return sum(map(cpu_seconds, self._ranks))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", default="156", help="words of each prompt; default %(default)s")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each answer; default %(default)s")
    parser.add_argument("--max-token-id", default="10000", help="of prompts; default %(default)s")
    parser.add_argument("--repeat", type=int, default=8, help="fours of runs; default %(default)s")
    parser.add_argument("--output", type=Path, help="write the speeds and costs as JSON")
    args, words = parser.parse_known_args(argv)
    if args.repeat < 2:
        parser.error("--repeat is below 2")
    fours = []
    try:
        with tempfile.TemporaryDirectory() as folder, running_server(["--disable-radix-cache", *words]) as server:
            client_words = ["--input-len", args.input_len, "--max-token-id", args.max_token_id]
            comparison = Comparison(server, args.streams, args.output_len, client_words, Path(folder))
            comparison.over_http(seed=0)  # warms both
            load = MachineLoad(server.pid)
            print(f"{'':>4}{'alone':>16}{'over HTTP':>16}{'cost':>9}    tokens/s, {args.streams} streams", flush=True)
            for seed in range(1, args.repeat + 1):
                runs = [comparison.alone(seed), comparison.over_http(seed), comparison.over_http(seed)]
                runs.append(comparison.alone(seed))
                alone, http = (runs[0], runs[3]), (runs[1], runs[2])
                cost = 1 - statistics.harmonic_mean(http) / statistics.harmonic_mean(alone)
                fours.append({"alone": alone, "over_http": http, "cost": cost})
                pairs = "".join(f"{first:>10.1f}{second:>7.1f}" for first, second in (alone, http))
                print(f"{seed:>4}{pairs}{cost:>8.1%}", flush=True)
            others = load.report().get("other_cores")
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.output is not None:
        args.output.write_text(json.dumps(fours, indent=2) + "\n")
    low, cost, high = statistics.quantiles((four["cost"] for four in fours), n=4)
    print(f"cost {cost:.1%} in the median of {len(fours)} (quartiles {low:.1%} to {high:.1%})")
    if others is not None:
        print(f"clients and others kept {others:.2f} of {os.cpu_count()} cores busy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
