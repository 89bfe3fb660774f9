"""Llama computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.support import check_parity


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="llama3-rope"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, id="default-rope"),
        pytest.param({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, id="linear-rope"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        # SmolLM2's proportions: tied, three query heads to one key/value head.
        pytest.param({"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 6}, id="tied"),
    ],
)
def test_parity(tmp_path: Path, overrides: dict[str, object]) -> None:
    check_parity("llama", tmp_path, **overrides)
