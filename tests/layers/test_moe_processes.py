"""Backends with ranks as processes over gloo: the collectives the server uses, not their stand-ins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from layers import process_groups
from layers.moe_options import MoEOptions
from layers.parallel_layout import ParallelLayout
from tests.layers.moe_support import make_experts, run_step
from tests.rank_processes import GROUP_TIMEOUT, Place, run_ranks

# Layouts of four ranks; one set of processes runs everything, since starting them takes most of the time.
LAYOUTS = [ParallelLayout(4, 4), ParallelLayout(4, 2), ParallelLayout(4, 1), ParallelLayout(4, 2, 2)]
COUNTS = {4: [[0, 5, 0, 7], [0, 0, 0, 0], [3, 3, 3, 3], [40, 1, 0, 2]], 2: [[5, 0], [2, 9]], 1: [[9], [2], [0]]}


def run_all(place: Place, layouts: list[ParallelLayout]) -> list[tuple[str, float]]:
    """(case, largest error) of every case of some layouts."""
    torch.set_num_threads(1)
    store, found = place.open_store(), []
    for number, layout in enumerate(layouts):
        for backend in ("none", "deepep", "megamoe"):
            if backend != "none" and layout.expert_tp_size > 1:
                continue
            prefixed = dist.PrefixStore(f"{number} {backend}", store)
            groups = process_groups.build(layout, place.rank, prefixed, torch.device("cpu"), GROUP_TIMEOUT).model
            groups = replace(groups, moe=MoEOptions(backend))
            with torch.inference_mode():
                experts = make_experts(groups)
                for counts in COUNTS[layout.dp_size]:
                    for extends in (True, False):
                        out, wanted = run_step(groups, experts, counts, extends=extends)
                        error = float((out - wanted).abs().max()) if out.numel() else 0.0
                        found.append((f"{layout} {backend} {counts} {extends}", error))
            dist.destroy_process_group()
    return found


@pytest.mark.timeout(240)
def test_all_backends() -> None:
    cases = sum(2 * len(COUNTS[layout.dp_size]) * (3 if layout.expert_tp_size == 1 else 1) for layout in LAYOUTS)
    for result in run_ranks(run_all, 4, LAYOUTS, timeout=200.0):
        assert len(result) == cases
        assert [(case, error) for case, error in result if error >= 1e-5] == []
