"""Processes for the ranks of a group, forked from one that has imported what they need: imports take a rank seconds."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch.distributed as dist

from layers import process_groups

Job = TypeVar("Job")
Result = TypeVar("Result")

# Seconds that ranks wait for each other: nothing is lost by waiting, as `run_ranks` ends them in time.
GROUP_TIMEOUT = 600.0

_context = multiprocessing.get_context("forkserver")
# What these import may start no thread and touch no GPU.
_context.set_forkserver_preload(["__main__", "tests.topology.engine_rank", "tests.scheduler.lockstep_rank"])


@dataclass(frozen=True)
class Place:
    """A rank among `size`, and where they meet. listener: the socket of the store, which lives in rank 0."""

    rank: int
    size: int
    port: int
    listener: socket.socket | None

    def open_store(self) -> dist.Store:
        listen_fd = None if self.listener is None else self.listener.detach()
        return process_groups.open_store("127.0.0.1", self.port, listen_fd=listen_fd, timeout=GROUP_TIMEOUT)


def run_ranks(target: Callable[[Place, Job], Result], size: int, job: Job, timeout: float) -> list[Result]:
    """What `target` returns on each rank, all of which run at once. It and the job are pickled.

    timeout: seconds for all of it. AssertionError when a rank ends without a result or takes longer.
    """
    processes: list[Any] = []
    pipes: list[Connection] = []
    deadline = time.monotonic() + timeout
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=size) as listener:
            for rank in range(size):
                ours, theirs = _context.Pipe(duplex=False)
                place = Place(rank, size, listener.getsockname()[1], listener if rank == 0 else None)
                process = _context.Process(target=_main, args=(theirs, target, place, job), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
        results: dict[int, Result] = {}
        while len(results) < size:
            left = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(left, max(0.1, deadline - time.monotonic()))
            assert ready, f"{len(left)} of {size} ranks take longer than {timeout} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} ended without a result") from None
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        assert [process.exitcode for process in processes] == [0] * size
        return [results[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _main(pipe: Connection, target: Callable[[Place, Job], Result], place: Place, job: Job) -> None:
    pipe.send(target(place, job))
