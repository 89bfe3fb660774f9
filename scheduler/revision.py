"""What the hosts of one engine must have alike besides their settings: the program, torch, and the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from models import file_digests, model_digest

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("disagg", "layers", "models", "scheduler", "server")
_SOURCES = (".py", ".c", ".h")


class Revision(msgspec.Struct, frozen=True):
    """What is on one host. config: a digest of the model's. sources, weights: digests of files by their names."""

    torch: str
    config: str
    sources: dict[str, str]
    weights: dict[str, str]

    @classmethod
    def of(cls, model_path: str, load_format: str) -> Revision:
        """ModelError for a model that is not there or cannot be read."""
        config, weights = model_digest(model_path), file_digests(model_path, load_format)
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
            return f"their configurations differ (fingerprint {self.config} and {other.config})"
        name = _first_difference(self.weights, other.weights)
        if name is None:
            return None
        here, there = (weights.get(name, "not there") for weights in (self.weights, other.weights))
        return f"{name} differs (fingerprint {here} and {there})"


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)), None)


def _sources() -> dict[str, str]:
    paths = [path for package in _PACKAGES for path in (_ROOT / package).rglob("*") if path.suffix in _SOURCES]
    return {str(path.relative_to(_ROOT)): _digest(path.read_bytes()) for path in paths}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
