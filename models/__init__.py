"""Model definitions, one file a family, and loading them from checkpoints."""

from models.base import ModelInfo
from models.errors import ModelError
from models.fingerprint import file_digests, weights_digest
from models.loader import load_model, model_digest, progress_bar

__all__ = [
    "ModelError",
    "ModelInfo",
    "file_digests",
    "load_model",
    "model_digest",
    "progress_bar",
    "weights_digest",
]
