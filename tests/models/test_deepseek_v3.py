"""DeepSeek-V3 computes what transformers computes, and says what of its settings it does not serve."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from layers.kv_cache import KVSpec
from layers.linear import pack_weights
from layers.moe import MoE
from models import ModelError
from tests.models.support import (
    YARN_ROPE,
    Runner,
    check_merged_experts,
    check_parity,
    check_prefill,
    edit_json,
    make_checkpoint,
    random_ids,
)

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def test_parity(tmp_path: Path) -> None:
    check_parity("deepseek_v3", tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"q_lora_rank": None, "rope_parameters": DEFAULT_ROPE}, id="direct query, plain rope"),
        pytest.param({"rope_interleave": False, "attention_bias": True}, id="half rotation, bias"),
        pytest.param({"rope_parameters": YARN_ROPE}, id="yarn without mscale"),
        pytest.param({"rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3}}, id="mscale"),
        pytest.param({"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}, id="one group"),
        pytest.param({"n_group": 2, "topk_group": 1, "norm_topk_prob": False}, id="not renormalised"),
        pytest.param({"n_shared_experts": 2, "routed_scaling_factor": 1.0}, id="two shared experts"),
        pytest.param({"rms_norm_eps": 1e-3}, id="other epsilon"),
    ],
)
def test_parity_of_variants(tmp_path: Path, overrides: dict[str, Any]) -> None:
    check_prefill(make_checkpoint("deepseek_v3", tmp_path, **overrides), tmp_path)


@pytest.mark.parametrize("dense_layers", [0, 2, 3])
def test_which_layers_are_sparse(tmp_path: Path, dense_layers: int) -> None:
    reference = make_checkpoint("deepseek_v3", tmp_path, first_k_dense_replace=dense_layers)
    model, _ = models.load_model(str(tmp_path))
    assert [isinstance(layer.mlp, MoE) for layer in model.model.layers] == [layer >= dense_layers for layer in range(3)]
    check_prefill(reference, tmp_path)


def test_one_latent_and_one_rotated_key_are_cached(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    _, info = models.load_model(str(tmp_path))
    assert info.kv_spec == KVSpec(3, num_kv_heads=1, head_dim=48 + 16, v_head_dim=48, value_in_key=True)
    assert info.kv_spec.bytes_per_token(torch.bfloat16) == 3 * 64 * 2


def test_packed_model_gives_the_same(tmp_path: Path) -> None:
    """W_UK and W_UV are used head by head and must survive the packing of the other linear layers."""
    make_checkpoint("deepseek_v3", tmp_path, kv_lora_rank=64, moe_intermediate_size=64)
    model, info = models.load_model(str(tmp_path), dtype="bfloat16")
    ids = random_ids(40)
    expected = Runner(model, info).step((1, ids))[0]
    pack_weights(model)
    assert model.model.layers[0].self_attn.kv_b_proj.weight.numel() > 0
    error = (Runner(model, info).step((1, ids))[0] - expected).abs()
    assert error.mean() < 0.05


def test_merged_experts(tmp_path: Path) -> None:
    check_merged_experts("deepseek_v3", tmp_path)


def test_older_spelling_of_yarn(tmp_path: Path) -> None:
    """DeepSeek's own files say rope_scaling.type."""
    reference = make_checkpoint("deepseek_v3", tmp_path)
    scaling = {**YARN_ROPE, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.8}
    theta = scaling.pop("rope_theta")
    del scaling["rope_type"]
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_scaling=scaling, rope_theta=theta)
    check_prefill(reference, tmp_path)


def test_draft_layers_are_skipped_with_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = make_checkpoint("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    names = ("eh_proj", "enorm", "mlp.experts.0.up_proj")
    draft = {f"model.layers.3.{name}.weight": torch.ones(4, 4) for name in names}
    save_file({**load_file(file), **draft}, file, {"format": "pt"})
    with caplog.at_level(logging.INFO):
        check_prefill(reference, tmp_path)
    lines = [record.getMessage() for record in caplog.records if "model.layers.3" in record.getMessage()]
    assert len(lines) == 1
    assert "skipped" in lines[0]


def test_layers_beyond_the_draft_layers_are_unknown(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.4.enorm.weight": torch.ones(4)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"unknown: model\.layers\.4\.enorm\.weight"):
        models.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group is 3"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "topk_group = 1 groups of 2 experts"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc'"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        models.load_model(str(tmp_path))
