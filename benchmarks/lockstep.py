"""What the agreement on a step costs data-parallel ranks on a CPU, for several numbers of ranks.

    python -m benchmarks.lockstep [--ranks 2 4 8] [--steps 2000] [--requests 32]

Each rank is a process with a scheduler that has `--requests` live requests. A step is what an engine does before its
forward pass: the row, its exchange over gloo on the loopback device, and the plan. Times are of rank 0, in
microseconds; with more ranks than cores they include waiting for a core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection

import torch

from layers import process_groups
from layers.parallel_layout import ParallelLayout
from scheduler.batch import Batch, BatchItem
from scheduler.lockstep import Lockstep
from scheduler.memory import KVMemory
from scheduler.messages import GenerateRequest, RequestOutput, SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerLimits
from scheduler.step_plan import StepRow

_TIMEOUT = 60.0


def decode_batch(scheduler: Scheduler, requests: int) -> Batch:
    """A decode step of requests that the scheduler has, without memory behind it."""
    items = []
    for number in range(requests):
        request = Request(GenerateRequest(f"r{number}", [1], SamplingParams(8, 0)))
        scheduler.requests[request.rid] = request
        items.append(BatchItem(request, 0, 1, 2, True, True, True, output_index=1))
    return Batch(items)


def run(rank: int, size: int, port: int, listener: socket.socket | None, steps: int, requests: int) -> list[float]:
    """Seconds of each step on this rank."""
    torch.set_num_threads(1)
    listen_fd = None if listener is None else listener.detach()
    store = process_groups.open_store("127.0.0.1", port, listen_fd=listen_fd, timeout=_TIMEOUT)
    groups = process_groups.build(ParallelLayout(size, size), rank, store, torch.device("cpu"), _TIMEOUT)
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
        assert plan.num_tokens == (requests,) * size
    return seconds


def child(
    rank: int, size: int, port: int, listener: socket.socket | None, steps: int, requests: int, answer: Connection
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    answer.send(run(rank, size, port, listener, steps, requests))


def measure(size: int, steps: int, requests: int) -> list[float]:
    """Seconds of each step on rank 0 of `size`."""
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0), backlog=size)
    port = listener.getsockname()[1]
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        own = listener if rank == 0 else None
        process = context.Process(target=child, args=(rank, size, port, own, steps, requests, sender))
        process.start()
        receivers.append(receiver)
        processes.append(process)
    listener.close()
    try:
        return [receiver.recv() for receiver in receivers][0]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def plan_alone(size: int) -> float:
    """Seconds to make a plan of a table that is there."""
    lockstep = Lockstep(process_groups.RankGroups(ParallelLayout(size, size)))
    repeats = 2_000
    tables = [[StepRow(step, 2, 32, 32, 0, 0, *(0,) * 7) for _ in range(size)] for step in range(repeats)]
    started = time.perf_counter()
    for table in tables:
        lockstep.plan(table)
    return (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=32)
    args = parser.parse_args()
    print(f"{'ranks':>5}  {'plan':>8}  {'median':>8}  {'p95':>8}   us a step, {os.cpu_count()} cores")
    for size in args.ranks:
        seconds = measure(size, args.steps, args.requests)[args.steps // 10 :]
        ninety_fifth = statistics.quantiles(seconds, n=20)[-1]
        figures = [plan_alone(size), statistics.median(seconds), ninety_fifth]
        print(f"{size:>5}  " + "  ".join(f"{1e6 * figure:>8.0f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
