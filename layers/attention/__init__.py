"""Attention over the paged cache: one interface, and a backend for each kind of device."""

from layers.attention.base import Attention, AttentionBackend
from layers.attention.torch_backend import TorchAttention

__all__ = ["Attention", "AttentionBackend", "TorchAttention"]
