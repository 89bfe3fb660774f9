"""Mixtral computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.support import check_merged_experts, check_parity, check_prefill, make_checkpoint


def test_parity(tmp_path: Path) -> None:
    check_parity("mixtral", tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"num_experts_per_tok": 3, "num_local_experts": 5}, id="odd"),
        pytest.param({"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}, id="tied, wide heads"),
    ],
)
def test_parity_of_variants(tmp_path: Path, overrides: dict[str, Any]) -> None:
    check_prefill(make_checkpoint("mixtral", tmp_path, **overrides), tmp_path)


def test_merged_experts(tmp_path: Path) -> None:
    check_merged_experts("mixtral", tmp_path)
