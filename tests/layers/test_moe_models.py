"""Whole models with their experts spread over ranks give the logits of one process, with every backend."""

from __future__ import annotations

import threading

import pytest
import torch

import models
from layers.forward_batch import ForwardBatch, ForwardMode, StepRows
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroups
from layers.parallel_layout import ParallelLayout
from tests.models.support import Runner, random_ids
from tests.models.thread_group import run_layout

pytestmark = pytest.mark.timeout(240)
PRESETS = ["tiny-qwen3-moe", "tiny-mixtral", "tiny-deepseek-v3"]
TOLERANCE = 1e-4
# Rows that the requests of up to four data-parallel ranks get in one step after another.
PASSES = [[7, 0, 20, 1], [0, 0, 1, 9], [1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1]]

# torch's default dtype and device, which loading sets, are shared by all threads.
_loading = threading.Lock()


def load(preset: str, groups: ParallelGroups | None = None) -> Runner:
    with _loading:
        model, info = models.load_model(preset, dtype="float32", groups=groups or ParallelGroups())
    return Runner(model, info, max_requests=2)


def idle_batch(runner: Runner) -> ForwardBatch:
    none = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        mode=ForwardMode.IDLE,
        input_ids=none,
        positions=none,
        slots=none,
        request_table=runner.table,
        request_rows=none,
        seq_lens=none.int(),
        extend_lens=none.int(),
        query_start=torch.zeros(1, dtype=torch.int32),
        seq_lens_cpu=[],
        extend_lens_cpu=[],
        kv_cache=runner.kv_cache,
        attention=runner.attention,
    )
    runner.attention.plan(batch)
    return batch


@torch.inference_mode()
def run_passes(runner: Runner, data_rank: int, data_size: int) -> torch.Tensor:
    """[T, V] logits of the rank's own request over all passes; every rank enters each of them."""
    ids = random_ids(sum(rows[data_rank] for rows in PASSES), seed=data_rank)
    logits, at = [], 0
    for rows in PASSES:
        counts = tuple(rows[:data_size])
        if not sum(counts):
            continue
        own = counts[data_rank]
        batch = runner.batch([(1, ids[at : at + own])]) if own else idle_batch(runner)
        batch.rows = StepRows(counts, extends=max(counts) > 1)
        logits.append(runner.model.logits(runner.model.forward(batch)))
        assert logits[-1].shape[0] == own
        at += own
    return torch.cat(logits)


LAYOUTS = [
    ((2, 1, 2), "none"),
    ((4, 1, 2), "none"),
    ((4, 2, 4), "none"),
    ((4, 4, 4), "none"),
    ((4, 2, 1), "none"),
    ((2, 1, 2), "deepep"),
    ((4, 4, 4), "deepep"),
    ((4, 2, 4), "deepep"),
    ((2, 2, 2), "megamoe"),
    ((4, 2, 4), "megamoe"),
    ((4, 4, 4), "megamoe"),
]
CASES = [(PRESETS[0], *case) for case in LAYOUTS]
CASES += [(preset, (4, 2, 4), backend) for preset in PRESETS[1:] for backend in ("none", "deepep", "megamoe")]
# Dense MLPs, of which DeepSeek has some, whole on every rank though attention is split.
WHOLE_DENSE = [(PRESETS[2], (2, 1, 2, 1), "deepep"), (PRESETS[2], (4, 2, 2, 1), "none")]


@pytest.mark.parametrize(("preset", "layout", "backend"), CASES + WHOLE_DENSE)
def test_logits_are_those_of_one_process(preset: str, layout: tuple[int, ...], backend: str) -> None:
    alone = load(preset)
    wanted = {}
    for rank in range(layout[1]):
        ids = random_ids(sum(rows[rank] for rows in PASSES), seed=rank)
        alone.lengths[1] = 0
        wanted[rank] = alone.step((1, ids))[0]

    def work(groups: ParallelGroups) -> tuple[int, torch.Tensor]:
        rank = groups.data.rank
        return rank, run_passes(load(preset, groups), rank, groups.data.size)

    for rank, logits in run_layout(ParallelLayout(*layout), work, MoEOptions(backend)):
        assert logits.shape == wanted[rank].shape
        assert (logits - wanted[rank]).abs().max() < TOLERANCE
