"""Mixture of experts: routers, experts, and the backends that move rows between ranks."""

from layers.moe.backend import MoEBackend, RecordingLimit
from layers.moe.experts import Experts
from layers.moe.layer import MoE, recording_limit, reserve_rows
from layers.moe.none_backend import NoneBackend
from layers.moe.registry import make_backend
from layers.moe.router import GroupedSigmoidRouter, Routing, SoftmaxRouter

__all__ = [
    "Experts",
    "GroupedSigmoidRouter",
    "MoE",
    "MoEBackend",
    "NoneBackend",
    "RecordingLimit",
    "Routing",
    "SoftmaxRouter",
    "make_backend",
    "recording_limit",
    "reserve_rows",
]
