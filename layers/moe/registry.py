"""The backends by name. A further one is one line here and its name in `layers.moe_options`."""

from __future__ import annotations

from collections.abc import Callable

from layers.moe.backend import MoEBackend
from layers.moe.deepep import DeepEPBackend
from layers.moe.megamoe import MegaMoEBackend
from layers.moe.none_backend import NoneBackend
from layers.parallel import ParallelGroups

BACKENDS: dict[str, Callable[[ParallelGroups], MoEBackend]] = {
    "none": NoneBackend,
    "deepep": DeepEPBackend,
    "megamoe": MegaMoEBackend,
}


def make_backend(groups: ParallelGroups) -> MoEBackend:
    """The backend that groups.moe names. ValueError where it does not go with the layout."""
    name = groups.moe.backend_name
    if name != "none" and groups.experts.size != groups.attention.size * groups.data.size:
        raise ValueError(f"--moe-a2a-backend {name} needs whole experts, spread over all ranks")
    return BACKENDS[name](groups)
