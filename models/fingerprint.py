"""What tells a checkpoint's weights from others of the same names and shapes, without reading all of them."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from models import presets
from models.checkpoint import checkpoint_files
from models.errors import ModelError

# Read of each tensor, from its middle. Training changes a tensor in many places, though in small floating-point formats
# not in all: among the 128 numbers of two bytes that this is, some differ.
_SAMPLE_BYTES = 256
_READERS = 8  # each waits for the disk most of the time
_MAX_HEADER_BYTES = 100_000_000  # that the format allows


def file_digests(path: str, load_format: str) -> dict[str, str]:
    """A digest for each weight file of a model by the file's name; none where weights are random (see `load_model`).

    ModelError for files that are missing or are not safetensors.
    """
    return {file.name: _digest(tensors) for file, tensors in _files(path, load_format).items()}


def weights_digest(path: str, load_format: str) -> str:
    """As `file_digests`, of all tensors, in whatever files they are; "random" where weights are."""
    files = _files(path, load_format)
    return _digest({name: seen for tensors in files.values() for name, seen in tensors.items()}) if files else "random"


def _files(path: str, load_format: str) -> dict[Path, dict[str, bytes]]:
    """What is seen of each tensor of each file."""
    if presets.has_random_weights(path, load_format):
        return {}
    files = checkpoint_files(Path(path))
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(files, pool.map(_tensors, files), strict=True))


def _tensors(path: Path) -> dict[str, bytes]:
    """Type, shape and sample of each tensor of a safetensors file, as bytes."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            found = {}
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                count = min(_SAMPLE_BYTES, stop - start)
                sample = os.pread(file.fileno(), count, 8 + length + (start + stop - count) // 2)
                if len(sample) < count:
                    raise ValueError(f"tensor {name} ends behind the file")
                found[name] = f"{entry['dtype']} {entry['shape']} ".encode() + sample
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: truncated or not a safetensors file: {error}") from error
    return found


def _digest(tensors: dict[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, seen in sorted(tensors.items()):
        digest.update(f"{name} {len(seen)} ".encode() + seen)
    return digest.hexdigest()
