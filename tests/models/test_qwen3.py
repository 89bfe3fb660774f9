"""Qwen3 computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.support import check_parity


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="untied"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"attention_bias": True, "num_key_value_heads": 4}, id="bias"),
    ],
)
def test_parity(tmp_path: Path, overrides: dict[str, object]) -> None:
    check_parity("qwen3", tmp_path, **overrides)
