"""Mixture of experts: routers, experts, and the backends that move rows between ranks."""

from layers.moe.backend import Dispatched, MoEBackend, NoneBackend
from layers.moe.experts import Experts
from layers.moe.layer import MoE
from layers.moe.router import GroupedSigmoidRouter, Routing, SoftmaxRouter

__all__ = [
    "Dispatched",
    "Experts",
    "GroupedSigmoidRouter",
    "MoE",
    "MoEBackend",
    "NoneBackend",
    "Routing",
    "SoftmaxRouter",
]
