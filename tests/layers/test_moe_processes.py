"""Backends with ranks as processes over gloo: the collectives the server uses, not their stand-ins."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from layers import process_groups
from layers.moe_options import MoEOptions
from layers.parallel_layout import ParallelLayout
from tests.layers.moe_support import make_experts, run_step

_TIMEOUT_S = 100
# Layouts of four ranks; one set of processes runs everything, since starting them takes most of the time.
LAYOUTS = [ParallelLayout(4, 4), ParallelLayout(4, 2), ParallelLayout(4, 1), ParallelLayout(4, 2, 2)]
COUNTS = {4: [[0, 5, 0, 7], [0, 0, 0, 0], [3, 3, 3, 3], [40, 1, 0, 2]], 2: [[5, 0], [2, 9]], 1: [[9], [2], [0]]}


def rank_main(rank: int, port: int, pipe: Connection) -> None:
    """Sends (case, largest error) for every case, then ends."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
    for number, layout in enumerate(LAYOUTS):
        own_store = dist.PrefixStore(str(number), store)
        for backend in ("none", "deepep", "megamoe"):
            if backend != "none" and layout.expert_tp_size > 1:
                continue
            prefixed = dist.PrefixStore(backend, own_store)
            device = torch.device("cpu")
            groups = process_groups.build(layout, rank, prefixed, device, _TIMEOUT_S).model  # type: ignore[arg-type]
            groups = replace(groups, moe=MoEOptions(backend))
            with torch.inference_mode():
                experts = make_experts(groups)
                for counts in COUNTS[layout.dp_size]:
                    for extends in (True, False):
                        out, wanted = run_step(groups, experts, counts, extends=extends)
                        error = float((out - wanted).abs().max()) if out.numel() else 0.0
                        pipe.send((f"{layout} {backend} {counts} {extends}", error))
            dist.destroy_process_group()
    pipe.close()


@pytest.mark.timeout(240)
def test_all_backends() -> None:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(4):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(rank, store.port, sending), daemon=True)
        process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    try:
        results: list[list[tuple[str, float]]] = [[] for _ in pipes]
        for pipe, result in zip(pipes, results, strict=True):
            while pipe.poll(_TIMEOUT_S):
                try:
                    result.append(pipe.recv())
                except EOFError:
                    break
        for process in processes:
            process.join(_TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.join()
    cases = sum(2 * len(COUNTS[layout.dp_size]) * (3 if layout.expert_tp_size == 1 else 1) for layout in LAYOUTS)
    for result in results:
        assert len(result) == cases
        assert [(case, error) for case, error in result if error >= 1e-5] == []
