"""Other weights under the same names and shapes have another fingerprint, the same ones in other files have not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import ModelError, file_digests, weights_digest
from tests.models.support import make_checkpoint

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fingerprint") / "llama"
    make_checkpoint("llama", path)
    return path


def changed(folder: Path, target: Path, change: Callable[[Tensors], None]) -> str:
    shutil.copytree(folder, target)
    tensors = load_file(target / FILE)
    change(tensors)
    save_file(tensors, target / FILE, {"format": "pt"})
    return str(target)


def retrain_one_projection(tensors: Tensors) -> None:
    """As low precision shows it: most numbers stay what they were."""
    weight = tensors["model.layers.1.self_attn.q_proj.weight"]
    weight.view(-1)[::20] += 1e-3


def swap_two_projections(tensors: Tensors) -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def lower_the_precision(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


@pytest.mark.parametrize("change", [retrain_one_projection, swap_two_projections, lower_the_precision])
def test_other_weights_have_another_fingerprint(
    folder: Path, tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    other = changed(folder, tmp_path / "other", change)
    assert weights_digest(other, "auto") != weights_digest(str(folder), "auto")
    assert file_digests(other, "auto")[FILE] != file_digests(str(folder), "auto")[FILE]


def test_the_same_weights_in_other_files_have_the_same(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / FILE)
    names = sorted(tensors, reverse=True)
    for number, part in enumerate((names[:5], names[5:]), start=1):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}-of-2.safetensors")
    assert weights_digest(str(tmp_path), "auto") == weights_digest(str(folder), "auto")
    assert list(file_digests(str(tmp_path), "auto")) == ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]


@pytest.mark.parametrize(("path", "load_format"), [("tiny-llama", "auto"), ("{folder}", "dummy")])
def test_random_weights_are_alike(folder: Path, path: str, load_format: str) -> None:
    path = path.format(folder=folder)
    assert (weights_digest(path, load_format), file_digests(path, load_format)) == ("random", {})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated or not a safetensors file"),
        (b"GIT LFS pointer", "truncated or not a safetensors file: a header of"),
        (b"\x02\0\0\0\0\0\0\0[]", "truncated or not a safetensors file"),
        (b'\x0c\0\0\0\0\0\0\0{"a": {"b":1}}', "truncated or not a safetensors file"),
        (b"half", "truncated or not a safetensors file: tensor .* ends behind the file"),
    ],
)
def test_a_file_that_is_none_is_named(folder: Path, tmp_path: Path, data: bytes, reason: str) -> None:
    whole = (folder / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: len(whole) // 2] if data == b"half" else data)
    with pytest.raises(ModelError, match=f"{FILE}: {reason}"):
        weights_digest(str(tmp_path), "auto")
