"""Which share of the machine each server of local mode gets."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from itertools import pairwise
from pathlib import Path

import msgspec

from scheduler.config import EngineConfig
from server.config import ServerConfig
from server.local_config import LocalConfig

HOST = "127.0.0.1"
_DECODE_FIELDS = ("disaggregation_decode_enable_radix_cache", "num_reserved_decode_tokens")


class Plan(msgspec.Struct, frozen=True):
    """One server to start.

    role: "prefill" or "decode". number: among those of its role. cores: CPU cores that it may use.
    wave: servers of wave 1 start when those of wave 0 are ready, and so on. Each measures what memory is left on its
    GPUs, so that servers which share one have to come one after the other.
    """

    role: str
    number: int
    cores: frozenset[int]
    config: ServerConfig
    wave: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


def make_plans(config: LocalConfig, cores: AbstractSet[int], num_gpus: int) -> list[Plan]:
    """Prefill servers first. num_gpus: that may be used, 0 for none."""
    roles = [("prefill", number) for number in range(config.num_prefill)]
    roles += [("decode", number) for number in range(config.num_decode)]
    size = config.servers.engine.layout().tp_size
    places = max(1, num_gpus // size)  # sets of GPUs that a server fits on
    plans = []
    for index, ((role, number), share) in enumerate(zip(roles, share_cores(cores, len(roles)), strict=True)):
        engine = _role_settings(config.servers.engine, role)
        wave = 0
        if num_gpus:
            # Neighbours in the list lie on different GPUs where there are enough.
            place, wave = index % places, index // places
            sharing = len(range(place, len(roles), places))
            engine = msgspec.structs.replace(
                engine,
                base_gpu_id=engine.base_gpu_id + place * size,
                mem_fraction_static=engine.mem_fraction_static * (wave + 1) / sharing,
            )
        server = msgspec.structs.replace(config.servers, host=HOST, port=0, engine=engine)
        plans.append(Plan(role, number, frozenset(share), server, wave))
    return plans


def _role_settings(engine: EngineConfig, role: str) -> EngineConfig:
    changes: dict[str, object] = {
        "disaggregation_mode": role,
        "max_queued_requests": None,  # the router's
    }
    if role == "prefill":
        defaults = EngineConfig(model_path=engine.model_path)
        changes |= {field: getattr(defaults, field) for field in _DECODE_FIELDS}
    return msgspec.structs.replace(engine, **changes)


def share_cores(cores: AbstractSet[int], parts: int) -> list[set[int]]:
    """The cores in `parts` shares of neighbours; one core each, some twice, where there are too few."""
    ordered = sorted(cores)
    if len(ordered) <= parts:
        return [{ordered[index % len(ordered)]} for index in range(parts)]
    bounds = [index * len(ordered) // parts for index in range(parts + 1)]
    return [set(ordered[low:high]) for low, high in pairwise(bounds)]


def count_gpus(engine: EngineConfig) -> int:
    """NVIDIA GPUs from --base-gpu-id on, without the driver's library: loading that takes seconds and GPU memory."""
    if engine.device == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    else:
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))  # in a container, those it was given
    return max(0, count - engine.base_gpu_id)
