"""A model split over ranks computes what the whole one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import models
from layers.parallel import ParallelGroups
from tests.models.support import Runner, make_checkpoint, random_ids, reference_logits
from tests.models.thread_group import run_ranks


def split_logits(path: str, size: int, ids: list[int]) -> list[torch.Tensor]:
    """Each rank's logits [T, V] of the sequence, prefilled in two chunks."""
    # Built one after another: the default dtype and device of torch are shared by the threads.
    ranks: dict[int, Runner] = {}

    def build(groups: ParallelGroups) -> None:
        for rank in range(size):
            if rank == groups.dense.rank:
                ranks[rank] = Runner(*models.load_model(path, dtype="float32", groups=groups))
            groups.dense.all_gather(torch.zeros(1))

    def work(groups: ParallelGroups) -> torch.Tensor:
        build(groups)
        return ranks[groups.dense.rank].run_chunked(1, ids, 30)

    return run_ranks(size, work)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        # 515 words do not divide, two key/value heads are fewer than four ranks.
        ("llama", {"vocab_size": 515, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True, "vocab_size": 515}),
        ("qwen3", {}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("mixtral", {}),
        ("deepseek_v3", {}),
    ],
)
def test_checkpoint(tmp_path: Path, family: str, overrides: dict[str, object], size: int) -> None:
    reference = make_checkpoint(family, tmp_path, **overrides)
    ids = random_ids(50)
    wanted = reference_logits(reference, ids)
    for logits in split_logits(str(tmp_path), size, ids):
        assert logits.shape == wanted.shape
        assert (logits - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("preset", list(models.presets.PRESETS))
def test_dummy_weights_do_not_depend_on_the_layout(preset: str) -> None:
    ids = random_ids(40)
    wanted = split_logits(preset, 1, ids)[0]
    for logits in split_logits(preset, 4, ids):
        assert (logits - wanted).abs().max() < 1e-4


def test_more_ranks_than_rows_of_the_vocabulary_split(tmp_path: Path) -> None:
    """With ceil division the last of four ranks holds no row of a vocabulary of 9."""
    reference = make_checkpoint("llama", tmp_path, vocab_size=9)
    ids = [2, 8, 0, 5, 7, 1]
    for logits in split_logits(str(tmp_path), 4, ids):
        assert (logits - reference_logits(reference, ids)).abs().max() < 1e-4
