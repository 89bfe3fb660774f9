"""What the hosts of one engine must have alike besides their settings: the program, torch, and the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from models import ModelError, model_digest
from models.checkpoint import checkpoint_files
from models.presets import resolve

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("disagg", "layers", "models", "scheduler", "server")
_SOURCES = (".py", ".c", ".h")
# Of a weight file: its beginning, where it says what is in it, and places spread evenly over all of it. To read every
# byte would take as long as loading.
_FIRST_BYTES, _PLACES, _PLACE_BYTES = 1 << 16, 16, 1 << 12


class Revision(msgspec.Struct, frozen=True):
    """What is on one host. config: a digest of the model's. sources, weights: digests of files by their names."""

    torch: str
    config: str
    sources: dict[str, str]
    weights: dict[str, str]

    @classmethod
    def of(cls, model_path: str, load_format: str) -> Revision:
        """ModelError for a model that is not there."""
        config = model_digest(model_path)
        weights: dict[str, str] = {}
        if load_format != "dummy" and resolve(model_path) is None:
            weights = {path.name: _sampled(path) for path in checkpoint_files(Path(model_path))}
        return cls(str(torch.__version__), config, _sources(), weights)

    def differing_program(self, other: Revision, here: str, there: str) -> str | None:
        """What to do about another program on host `there`; None where it is the same."""
        if self.torch != other.torch:
            what = f"torch is {self.torch} on {here} and {other.torch} on {there}"
        elif (name := _first_difference(self.sources, other.sources)) is not None:
            what = f"{name} of this program is another on {here} than on {there}"
        else:
            return None
        return f"{what}: install the same version on all nodes"

    def differing_model(self, other: Revision) -> str | None:
        """How the models behind two paths differ; None where they seem the same."""
        if self.config != other.config:
            return "their configurations differ"
        name = _first_difference(self.weights, other.weights)
        return None if name is None else f"{name} differs"


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)), None)


def _sources() -> dict[str, str]:
    paths = [path for package in _PACKAGES for path in (_ROOT / package).rglob("*") if path.suffix in _SOURCES]
    return {str(path.relative_to(_ROOT)): _digest(path.read_bytes()) for path in paths}


def _sampled(path: Path) -> str:
    """Of size, beginning and samples: other weights in the same shapes differ in some, if not in one tensor alone."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            pieces = [size.to_bytes(8), file.read(_FIRST_BYTES)]
            for place in range(_PLACES):
                file.seek(size * place // _PLACES)
                pieces.append(file.read(_PLACE_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return _digest(b"".join(pieces))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
