"""One rank of an engine of several, for parity tests: `python -m tests.topology.engine_rank`.

It reads a `Job` in JSON from standard input, runs its scenarios, and writes the `Result`s in JSON to standard output.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from layers import process_groups
from scheduler.config import EngineConfig
from scheduler.engine import Engine, Generation, resolve_device
from scheduler.messages import SamplingParams

ROOT = Path(__file__).resolve().parent.parent.parent
_TIMEOUT = 110.0


class Scenario(msgspec.Struct, frozen=True):
    """Rounds of prompts through one engine, each round after the one before.

    params: for the prompts of each round in their order. options: GenerateRequest fields. With data-parallel attention
    the prompts of a round are dealt out to the groups in turn.
    """

    config: EngineConfig
    rounds: list[list[list[int]]]
    params: list[SamplingParams]
    options: dict[str, int | bool] = {}


class Result(msgspec.Struct):
    """What the rounds of a scenario gave, one after another."""

    generations: list[Generation]
    retractions: int


class Job(msgspec.Struct):
    rank: int
    size: int
    store_fd: int
    store_port: int
    scenarios: list[Scenario]


def run_scenario(scenario: Scenario, groups: process_groups.RankGroups = process_groups.ALONE) -> Result:
    engine = Engine(scenario.config, groups=groups)
    rank, size = groups.place.dp_rank, groups.layout.dp_size
    generations = []
    for prompts in scenario.rounds:
        params = scenario.params[: len(prompts)]
        generations += engine.generate(prompts[rank::size], params[rank::size], **scenario.options)
    engine.scheduler.check_memory()
    return Result(generations, engine.scheduler.retractions_total)


def run_on_ranks(scenarios: list[Scenario], **sizes: int | bool) -> list[list[Result]]:
    """The scenarios' results on each of the processes that are one engine. sizes: EngineConfig fields of the layout."""
    scenarios = [
        msgspec.structs.replace(scenario, config=msgspec.structs.replace(scenario.config, **sizes))
        for scenario in scenarios
    ]
    size = scenarios[0].config.tp_size
    processes = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(size):
            fd = listener.fileno() if rank == 0 else -1
            job = Job(rank, size, fd, listener.getsockname()[1], scenarios)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.topology.engine_rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                pass_fds=[] if fd < 0 else [fd],
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            process.stdin = None
            processes.append(process)
    try:
        outputs = [process.communicate(timeout=_TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * size
    return [msgspec.json.decode(output, type=list[Result]) for output in outputs]


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    store = process_groups.open_store(
        "127.0.0.1", job.store_port, listen_fd=job.store_fd if job.store_fd >= 0 else None, timeout=60.0
    )
    config = job.scenarios[0].config
    device = resolve_device(config.device, job.rank)
    groups = process_groups.build(config.layout(), job.rank, store, device, timeout=60.0)
    results = [run_scenario(scenario, groups) for scenario in job.scenarios]
    sys.stdout.buffer.write(msgspec.json.encode(results))


if __name__ == "__main__":
    main()
