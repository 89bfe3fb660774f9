"""Qwen3-MoE computes what transformers computes, with experts in the layers that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import models
from layers.moe import MoE
from models import ModelError
from tests.models.support import check_merged_experts, check_parity, check_prefill, edit_json, make_checkpoint


def test_parity(tmp_path: Path) -> None:
    check_parity("qwen3_moe", tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"norm_topk_prob": False}, id="not renormalised"),
        pytest.param({"num_experts_per_tok": 8, "tie_word_embeddings": True}, id="all experts, tied"),
        pytest.param({"num_experts_per_tok": 1, "attention_bias": True}, id="one expert, bias"),
    ],
)
def test_parity_of_variants(tmp_path: Path, overrides: dict[str, Any]) -> None:
    check_prefill(make_checkpoint("qwen3_moe", tmp_path, **overrides), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "sparse"),
    [
        ({}, [True, True, True, True]),
        ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False]),
    ],
)
def test_which_layers_are_sparse(tmp_path: Path, overrides: dict[str, Any], sparse: list[bool]) -> None:
    reference = make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=4, **overrides)
    model, _ = models.load_model(str(tmp_path))
    assert [isinstance(layer.mlp, MoE) for layer in model.model.layers] == sparse
    check_prefill(reference, tmp_path)


def test_merged_experts(tmp_path: Path) -> None:
    check_merged_experts("qwen3_moe", tmp_path)


def test_older_name_of_the_number_of_experts(tmp_path: Path) -> None:
    reference = make_checkpoint("qwen3_moe", tmp_path)
    edit_json(tmp_path / "config.json", num_experts=8, num_local_experts=None)
    check_prefill(reference, tmp_path)


def test_impossible_routing_names_file_and_field(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    edit_json(tmp_path / "config.json", num_experts_per_tok=9)
    with pytest.raises(ModelError, match=r"config\.json: num_experts_per_tok is 9; expected 1 to .* 8"):
        models.load_model(str(tmp_path))
