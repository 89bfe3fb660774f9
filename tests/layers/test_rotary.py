"""Rotary embeddings: transformers' frequencies, turns by hand, and the precision of the table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from layers.rotary import RopeConfig, RotaryEmbedding, apply_rotary, inverse_frequencies

HEAD_DIM = 64


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            {"kind": "llama3", "factor": 8.0, "original_max_positions": 256},
        ),
        (
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
            {"kind": "yarn", "factor": 8.0, "original_max_positions": 256},
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
            {
                "kind": "yarn",
                "factor": 8.0,
                "original_max_positions": 256,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
        ),
        (
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
            {"kind": "yarn", "factor": 8.0, "original_max_positions": 256, "attention_factor": 1.5},
        ),
    ],
)
def test_frequencies_match_transformers(settings: dict[str, Any], config: dict[str, Any]) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 20000.0, **settings},
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](theirs, "cpu")
    got, factor = inverse_frequencies(RopeConfig(HEAD_DIM, 20000.0, 2048, **config))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    assert factor == pytest.approx(wanted_factor)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="rope type 'spiral' is not one of default, linear, llama3, yarn"):
        inverse_frequencies(RopeConfig(8, 10000.0, 16, kind="spiral"))


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_by_position_times_frequency(interleaved: bool) -> None:
    dim, theta = 8, 100.0
    rotary = RotaryEmbedding(RopeConfig(dim, theta, 50, interleaved=interleaved))
    positions = torch.tensor([0, 3, 49])
    q, k = torch.randn(3, 4, dim), torch.randn(3, 2, dim)
    got_q, got_k = apply_rotary(q, k, rotary(positions), rotary.interleaved)
    for x, got in ((q, got_q), (k, got_k)):
        assert got.shape == x.shape
        for row, position in enumerate(positions.tolist()):
            for pair in range(dim // 2):
                i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
                angle = position * theta ** (-2 * pair / dim)
                turn = complex(math.cos(angle), math.sin(angle))
                wanted = torch.complex(x[row, :, i], x[row, :, j]) * turn
                torch.testing.assert_close(torch.complex(got[row, :, i], got[row, :, j]), wanted, rtol=1e-4, atol=1e-5)


def test_table_is_float32_in_a_bfloat16_model() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = RotaryEmbedding(RopeConfig(16, 10000.0, 5000))
    finally:
        torch.set_default_dtype(before)
    assert rotary.cos_sin_PD.dtype == torch.float32
    assert rotary(torch.tensor([4999]))[0, 0].item() == pytest.approx(math.cos(4999), abs=1e-3)
    q = torch.randn(1, 2, 16).bfloat16()
    assert apply_rotary(q, q, rotary(torch.tensor([4999])))[0].dtype == torch.bfloat16


def test_rotation_reads_views_of_a_merged_projection() -> None:
    rotary = RotaryEmbedding(RopeConfig(16, 10000.0, 64))
    merged = torch.randn(5, 4 * 16 + 2 * 16 * 2)
    q, k, _ = (part.unflatten(-1, (-1, 16)) for part in merged.split((64, 32, 32), dim=-1))
    rows = rotary(torch.arange(5))
    for got, wanted in zip(apply_rotary(q, k, rows), apply_rotary(q.contiguous(), k.contiguous(), rows), strict=True):
        assert torch.equal(got, wanted)
