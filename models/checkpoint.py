"""The safetensors files of a checkpoint folder: which belong to it, and reading slices of their tensors."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.errors import ModelError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Checkpoint:
    """Tensors of a folder by name. Construction reads headers only; ModelError names the file at fault.

    Files beside the checkpoint's are named in a warning.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths = checkpoint_files(folder)
        extra = sorted({path.name for path in folder.glob("*.safetensors")} - {path.name for path in self._paths})
        if extra:
            logger.warning("%s: not part of the checkpoint and ignored: %s", folder, ", ".join(extra))
        self._files = [_open(path) for path in self._paths]
        self._where: dict[str, int] = {}
        for number, file in enumerate(self._files):
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in self._where:
                    self._check_equal(name, self._where[name], number)
                else:
                    self._where[name] = number

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def path(self, name: str) -> Path:
        return self._paths[self._where[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """ModelError for a type that weights cannot have."""
        stored = str(self._slice(name).get_dtype())
        dtype = _DTYPES.get(stored)
        if dtype is None:
            raise ModelError(f"{self.path(name)}: tensor {name} has dtype {stored}; supported: {', '.join(_DTYPES)}")
        return dtype

    def read(self, name: str, source: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The (start, stop) ranges of the tensor, one a dimension, on the CPU in the stored dtype."""
        try:
            if all(span == (0, size) for span, size in zip(source, self.shape(name), strict=True)):
                return self._files[self._where[name]].get_tensor(name)
            return self._slice(name)[tuple(slice(start, stop) for start, stop in source)]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.path(name)}: tensor {name} cannot be read: {error}") from None

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    def _check_equal(self, name: str, first: int, second: int) -> None:
        if not torch.equal(self._files[first].get_tensor(name), self._files[second].get_tensor(name)):
            raise ModelError(
                f"tensor {name} is in both {self._paths[first]} and {self._paths[second]} with different values"
            )


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint.

    The index decides; without one, model.safetensors; without that, a complete set of numbered shards or the only file.
    """
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX_NAME).exists():
        chosen = _indexed_files(folder)
        missing = [name for name in chosen if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder}: files named in {INDEX_NAME} are missing: {', '.join(missing)}")
    elif "model.safetensors" in present:
        chosen = ["model.safetensors"]
    else:
        chosen = _numbered_shards(folder, present) or present
        if not chosen:
            raise ModelError(f"{folder}: no *.safetensors files; other weight formats have to be converted first")
        if len(chosen) > 1 and _SHARD.match(chosen[0]) is None:
            raise ModelError(f"{folder}: {', '.join(chosen)}: no {INDEX_NAME} says which of them belong together")
    return [folder / name for name in chosen]


def _indexed_files(folder: Path) -> list[str]:
    path = folder / INDEX_NAME
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        plain = all(isinstance(name, str) and name == Path(name).name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        plain, names = False, []
    if not plain or not names:
        raise ModelError(f"{path}: expected a JSON object whose weight_map gives a file name for each tensor")
    return names


def _numbered_shards(folder: Path, present: list[str]) -> list[str]:
    """Shards k-of-n when all present files are of one set; ModelError when some of it is missing."""
    matches = [match for match in map(_SHARD.match, present) if match]
    sets = {(match["stem"], match["count"]) for match in matches}
    if len(sets) != 1:
        return []
    ((stem, count),) = sets
    width = len(count)
    wanted = [f"{stem}-{number:0{width}d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ModelError(f"{folder}: shards are missing: {', '.join(missing)}")
    return wanted


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: truncated or not a safetensors file: {error}") from None
