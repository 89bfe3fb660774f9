"""Qwen2 computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.support import YARN_ROPE, check_parity


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="tied"),
        pytest.param({"tie_word_embeddings": False, "num_key_value_heads": 1}, id="untied"),
        pytest.param({"rope_parameters": YARN_ROPE}, id="yarn"),
    ],
)
def test_parity(tmp_path: Path, overrides: dict[str, object]) -> None:
    check_parity("qwen2", tmp_path, **overrides)
