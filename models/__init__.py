"""Model definitions, one file a family, and loading them from checkpoints."""

from models.base import CausalLM, ModelInfo
from models.errors import ModelError
from models.loader import load_model, model_digest, model_info, progress_bar

__all__ = ["CausalLM", "ModelError", "ModelInfo", "load_model", "model_digest", "model_info", "progress_bar"]
