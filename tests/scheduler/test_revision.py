"""What hosts of one engine compare: another program or another model is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from models import ModelError
from scheduler.revision import Revision
from tests.models.support import make_checkpoint


def test_the_same_program_and_preset() -> None:
    one = Revision.of("tiny-llama", "auto")
    assert one == Revision.of("tiny-llama", "dummy")
    assert (one.torch, one.weights) == (str(torch.__version__), {})
    assert {"scheduler/revision.py", "layers/moe/exchange.py", "server/supervisor.py"} <= one.sources.keys()
    assert one.differing_program(one, "node 0", "node 1") is one.differing_model(one) is None
    other = Revision.of("tiny-qwen3-moe", "auto")
    difference = f"their configurations differ (fingerprint {one.config} and {other.config})"
    assert one.differing_model(other) == difference


def test_another_program_is_named() -> None:
    one = Revision.of("tiny-llama", "auto")
    changed = msgspec.structs.replace(one, sources=one.sources | {"layers/norm.py": "another"})
    advice = "install the same version on all nodes"
    assert one.differing_program(changed, "node 0", "node 1") == (
        f"layers/norm.py of this program is another on node 0 than on node 1: {advice}"
    )
    more = msgspec.structs.replace(one, sources=one.sources | {"layers/new.py": "new"})
    for here, there in ((one, more), (more, one)):
        assert (here.differing_program(there, "a", "b") or "").startswith("layers/new.py of this program is another")
    older = msgspec.structs.replace(one, torch="2.11.0")
    assert older.differing_program(one, "node 0", "node 1") == (
        f"torch is 2.11.0 on node 0 and {torch.__version__} on node 1: {advice}"
    )


def test_other_weights_of_the_same_shapes_are_named(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "one")
    for name in ("same", "other"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    file = tmp_path / "other" / "model.safetensors"
    tensors = {name: tensor * 1.001 for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    assert file.stat().st_size == (tmp_path / "one" / "model.safetensors").stat().st_size
    one, same, other = (Revision.of(str(tmp_path / name), "auto") for name in ("one", "same", "other"))
    assert one.differing_model(same) is None
    here, there = (revision.weights["model.safetensors"] for revision in (one, other))
    assert one.differing_model(other) == f"model.safetensors differs (fingerprint {here} and {there})"
    dummy = Revision.of(str(tmp_path / "other"), "dummy")
    assert one.differing_model(dummy) == f"model.safetensors differs (fingerprint {here} and not there)"


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        Revision.of(str(tmp_path / "none"), "auto")
