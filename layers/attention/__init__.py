from layers.attention.base import Attention, AttentionBackend
from layers.attention.torch_backend import TorchAttention

__all__ = ["Attention", "AttentionBackend", "TorchAttention"]
