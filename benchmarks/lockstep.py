"""What keeping ranks in lockstep costs: the agreement alone, its share of a decode step, and an idle group.

    python -m benchmarks.lockstep [--parts agreement share idle]
    python -m benchmarks.lockstep --parts share --device cuda --models Qwen3-30B-A3B --batch-sizes 1 32

agreement: for several numbers of data-parallel ranks, what an engine does before its forward pass (the row, its
exchange over gloo on the loopback device, the plan), without a model. Microseconds on rank 0.
share: two data-parallel ranks decode with a model (on GPUs with decode graphs and the overlap loop, as a server does),
in blocks of steps by turns: as they are, and with the plan known beforehand and no word from rank 0, so that ranks
neither tell nor ask. The share is the difference of a pair of blocks' median steps over the step without; the median of
all pairs and their quartiles. It contains what ranks wait for each other and, without lockstep, would not. "own work"
does not: telling, asking and planning on the rank that comes last to a step, which waits for nobody.
idle: a server of two data-parallel ranks with nothing to do, on a CPU; CPU time of each rank process in percent of a
core.

With more ranks than cores, or beside other work, times include waiting for a core: each part prints how many cores
other processes kept busy meanwhile, and figures taken beside other work are worth little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import torch
import zmq

from benchmarks._machine import MachineLoad, tree_cpu_seconds_by_process
from benchmarks._server import running_server
from benchmarks.model_shapes import SHAPES, write_shape
from layers import process_groups
from layers.parallel_layout import ParallelLayout
from scheduler.batch import Batch, BatchItem
from scheduler.config import EngineConfig
from scheduler.engine import Engine, resolve_device
from scheduler.lockstep import Lockstep
from scheduler.memory import KVMemory
from scheduler.messages import GenerateRequest, RequestOutput, SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerLimits
from scheduler.step_exchange import Follower, FollowerAddress, Leader, StepExchange
from scheduler.step_plan import StepPlan, StepRow
from server import default_model

PARTS = ("agreement", "share", "idle")
_TIMEOUT = 120.0
_PROMPT_TOKENS = 16
_SETTLING_STEPS = 5  # of every block, not counted: the ranks meet again


# Rank processes.


def on_ranks(size: int, device: str, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(groups, *args)` returns on each of `size` data-parallel ranks, a GPU each where `device` is "cuda".

    RuntimeError when a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    receivers, processes = [], []
    answers: list[Any] = []
    with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
        port = listener.getsockname()[1]
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            own = listener if rank == 0 else None
            process = context.Process(target=_child, args=(rank, size, device, port, own, sender, work, args))
            process.start()
            sender.close()  # so that the end of the child is the end of the pipe
            receivers.append(receiver)
            processes.append(process)
    try:
        for rank, receiver in enumerate(receivers):
            try:
                answers.append(receiver.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} of {size} ended without a result; see its output above") from None
        return answers
    finally:
        for process in processes:
            process.join(10 if len(answers) == size else 0)
            process.kill()
            process.join()


def _child(
    rank: int,
    size: int,
    device: str,
    port: int,
    listener: socket.socket | None,
    answer: Connection,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    listen_fd = None if listener is None else listener.detach()
    store = process_groups.open_store("127.0.0.1", port, listen_fd=listen_fd, timeout=_TIMEOUT)
    groups = process_groups.build(ParallelLayout(size, size), rank, store, resolve_device(device, rank), _TIMEOUT)
    answer.send(work(groups, *args))


# The agreement alone.


def decode_batch(scheduler: Scheduler, requests: int) -> Batch:
    """A decode step of requests that the scheduler has, without memory behind it."""
    items = []
    for number in range(requests):
        request = Request(GenerateRequest(f"r{number}", [1], SamplingParams(8, 0)))
        scheduler.requests[request.rid] = request
        items.append(BatchItem(request, 0, 1, 2, True, True, True, output_index=1))
    return Batch(items)


def agreements(groups: process_groups.RankGroups, steps: int, requests: int) -> list[float]:
    """Seconds of each step on this rank."""
    memory = KVMemory(64, 16, requests, 64, torch.device("cpu"))
    scheduler = Scheduler(memory, SchedulerLimits(64, 100, None, 64, None, "fcfs", 1.0), ())
    batch = decode_batch(scheduler, requests)
    outputs = [RequestOutput(item.request.rid, [7]) for item in batch.items]
    lockstep = Lockstep(groups)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = lockstep.agree(scheduler, batch, outputs, results_pending=False)
        seconds.append(time.perf_counter() - started)
        assert plan.num_tokens == (requests,) * groups.layout.dp_size
    return seconds


def plan_alone(size: int) -> float:
    """Seconds to make a plan of a table that is there."""
    lockstep = Lockstep(process_groups.RankGroups(ParallelLayout(size, size)))
    repeats = 2_000
    tables = [[StepRow(step, 2, 32, 32, 0, 0, *(0,) * 8) for _ in range(size)] for step in range(repeats)]
    started = time.perf_counter()
    for table in tables:
        lockstep.plan(table)
    return (time.perf_counter() - started) / repeats


def print_agreement(args: argparse.Namespace) -> None:
    print(f"Agreement on a step, microseconds ({os.cpu_count()} cores, {args.requests} requests a rank)")
    print(f"{'ranks':>8}{'plan alone':>12}{'median':>9}{'p95':>9}")
    load = MachineLoad(os.getpid())
    for size in args.ranks:
        seconds = on_ranks(size, "cpu", agreements, args.steps, args.requests)[0][args.steps // 10 :]
        figures = [plan_alone(size), statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]]
        plan, median, ninety_fifth = (1e6 * figure for figure in figures)
        print(f"{size:>8}{plan:>12.0f}{median:>9.0f}{ninety_fifth:>9.0f}", flush=True)
    print_others(load)


# Its share of a decode step.


class TimedLockstep:
    """The real agreement; `seconds` adds up the time spent in it."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self.seconds = 0.0
        self.plan: StepPlan | None = None

    @property
    def is_busy(self) -> bool:
        return self._lockstep.is_busy

    def agree(self, *args: Any) -> StepPlan:
        started = time.perf_counter()
        self.plan = self._lockstep.agree(*args)
        self.seconds += time.perf_counter() - started
        return self.plan


class KnownPlan:
    """In its place where every rank's rows are known."""

    is_busy = True

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def agree(self, *_: Any) -> StepPlan:
        return self._plan


def make_exchange(engine: Engine, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> StepExchange:
    """Rank 0's messages to the others, over the sockets that a server's ranks use."""
    groups = engine.groups
    if groups.rank > 0:
        return Follower(context, engine.scheduler, f"ipc://{folder}/steps-{groups.rank}", _TIMEOUT)
    size = groups.layout.tp_size
    inbound = [f"ipc://{folder}/inbound-{dp_rank}" for dp_rank in range(size)]
    followers = [FollowerAddress(f"ipc://{folder}/steps-{rank}", rank) for rank in range(1, size)]
    return Leader(context, engine.scheduler, inbound, followers)


def decode_steps(
    groups: process_groups.RankGroups,
    device: str,
    model: str,
    load_format: str,
    batch_size: int,
    blocks: int,
    block_steps: int,
    folder: str,
) -> dict[str, list[float]]:
    """Seconds of the median decode step of each block on this rank, by turns with lockstep and without.

    lockstep: of every step with it, the seconds inside the exchange and the agreement, waiting for others included.
    """
    steps = 2 * blocks * block_steps
    config = EngineConfig(
        model_path=model,
        load_format=load_format,
        device=device,
        num_threads=1,
        tp_size=groups.layout.tp_size,
        dp_size=groups.layout.dp_size,
        enable_dp_attention=True,
        context_length=_PROMPT_TOKENS + steps + 64,
        max_total_tokens=batch_size * (_PROMPT_TOKENS + steps + 128),
        max_running_requests=batch_size,
        log_level="warning",
    )
    engine = Engine(config, groups=groups)
    for number in range(batch_size):
        prompt = [(31 * number + 7 * position) % 199 + 1 for position in range(_PROMPT_TOKENS)]
        params = SamplingParams(steps + 48, 0, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(str(number), prompt, params))
    assert engine.lockstep is not None
    real = TimedLockstep(engine.lockstep)
    engine.lockstep = real  # type: ignore[assignment]
    result: dict[str, list[float]] = {"with": [], "without": [], "lockstep": []}
    with zmq.Context() as context:
        exchange = make_exchange(engine, context, folder)
        outputs: list[RequestOutput] = []
        while real.plan is None or real.plan.extends or real.plan.num_tokens != (batch_size,) * groups.layout.dp_size:
            outputs = engine.step()
        known = KnownPlan(real.plan)
        for _ in range(blocks):
            seconds = []
            for _ in range(block_steps):
                started = time.perf_counter()
                exchange.begin(outputs, 0, True)
                real.seconds = time.perf_counter() - started
                outputs = engine.step()
                seconds.append(time.perf_counter() - started)
                result["lockstep"].append(real.seconds)
            result["with"].append(statistics.median(seconds[_SETTLING_STEPS:]))
            engine.lockstep = known  # type: ignore[assignment]
            seconds = []
            for _ in range(block_steps):
                started = time.perf_counter()
                outputs = engine.step()
                seconds.append(time.perf_counter() - started)
            result["without"].append(statistics.median(seconds[_SETTLING_STEPS:]))
            engine.lockstep = real  # type: ignore[assignment]
        assert all(len(request.output_ids) > steps for request in engine.scheduler.requests.values())
        context.destroy(linger=1000)
    engine.close()
    return result


def print_share(args: argparse.Namespace) -> None:
    print(f"\nShare of a decode step, 2 data-parallel ranks, {args.blocks} pairs of blocks, {args.device}")
    print(f"{'model':>24}{'requests':>10}{'without':>12}{'with':>12}{'share':>9}{'(quartiles)':>20}{'own work':>21}")
    load = MachineLoad(os.getpid())
    for model in args.models:
        for batch_size in args.batch_sizes:
            with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
                path, load_format = model, "auto"
                if model == "default":
                    path = str(default_model.ensure(quiet=True))
                elif model in SHAPES:
                    path, load_format = str(write_shape(model, Path(folder) / model)), "dummy"
                settings = (path, load_format, batch_size, args.blocks, args.block_steps, folder)
                ranks = on_ranks(2, args.device, decode_steps, args.device, *settings)
            without, with_ = (statistics.median(ranks[0][name]) for name in ("without", "with"))
            shares = [100 * (a / b - 1) for a, b in zip(ranks[0]["with"], ranks[0]["without"], strict=True)]
            low, share, high = statistics.quantiles(shares, n=4)
            # The rank that comes last to a step waits for nobody.
            own = statistics.median(map(min, zip(*(rank["lockstep"] for rank in ranks), strict=True)))
            quartiles = f"({low:+.1f}% to {high:+.1f}%)"
            print(
                f"{Path(path).name:>24}{batch_size:>10}{1e3 * without:>9.3f} ms{1e3 * with_:>9.3f} ms{share:>+8.1f}%"
                f"{quartiles:>20}{1e6 * own:>10.0f} us{100 * own / without:>7.2f}%",
                flush=True,
            )
    print_others(load)


# An idle group.


def print_idle(args: argparse.Namespace) -> None:
    words = ["--model-path", "tiny-qwen3-moe", "--device", "cpu", "--num-threads", "1", "--max-total-tokens", "4096"]
    words += ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
    with running_server(words) as server:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
        time.sleep(args.settle_seconds)
        load = MachineLoad(os.getpid())
        before, started = rank_seconds(), time.perf_counter()
        time.sleep(args.idle_seconds)
        after, elapsed = rank_seconds(), time.perf_counter() - started
    if len(before) != 2 or before.keys() != after.keys():
        raise RuntimeError(f"expected the same 2 rank processes before and after, found {before} and {after}")
    shares = [100 * (after[pid] - before[pid]) / elapsed for pid in sorted(before)]
    each = ", ".join(f"{share:.2f}%" for share in shares)
    print(f"\nIdle group of 2 data-parallel ranks over {elapsed:.0f} s: {each} of a core per rank")
    print_others(load)


def rank_seconds() -> dict[int, float]:
    """CPU seconds of every rank process below this one, by process id."""
    return {pid: seconds for pid, seconds in tree_cpu_seconds_by_process(os.getpid()).items() if is_rank(pid)}


def is_rank(pid: int) -> bool:
    try:
        return b"scheduler.rank" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def print_others(load: MachineLoad) -> None:
    others = load.report().get("other_cores")
    if others is not None:
        print(f"Other processes kept {others:.2f} of {os.cpu_count()} cores busy", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks of `agreement`")
    parser.add_argument("--steps", type=int, default=2000, help="of `agreement`")
    parser.add_argument("--requests", type=int, default=32, help="live requests a rank of `agreement`")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["tiny-qwen3-moe", "default"],
        help="for `share`: folders, presets, shapes of model_shapes.py (with random weights), or `default`, the model "
        "that the server takes by default",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of `share`; cuda needs two GPUs")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16], help="requests a rank of `share`")
    parser.add_argument("--blocks", type=int, default=16, help="pairs of blocks of `share`")
    parser.add_argument("--block-steps", type=int, default=30, help="decode steps a block")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument(
        "--settle-seconds", type=float, default=5.0, help="after the last request, before `idle` begins"
    )
    args = parser.parse_args(words)
    if args.blocks < 2 or args.block_steps <= _SETTLING_STEPS:
        parser.error(f"--blocks has to be at least 2 and --block-steps more than {_SETTLING_STEPS}")
    for part, action in (("agreement", print_agreement), ("share", print_share), ("idle", print_idle)):
        if part in args.parts:
            action(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
