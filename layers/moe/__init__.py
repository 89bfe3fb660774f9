"""Mixture of experts: routers, experts, and the backends that move rows between ranks."""

from layers.moe.backend import MoEBackend
from layers.moe.experts import Experts
from layers.moe.layer import MoE, most_recorded_rows, reserve_rows
from layers.moe.none_backend import NoneBackend
from layers.moe.registry import make_backend
from layers.moe.router import GroupedSigmoidRouter, Routing, SoftmaxRouter

__all__ = [
    "Experts",
    "GroupedSigmoidRouter",
    "MoE",
    "MoEBackend",
    "NoneBackend",
    "Routing",
    "SoftmaxRouter",
    "make_backend",
    "most_recorded_rows",
    "reserve_rows",
]
