"""Whether the package of a transfer backend is installed, found out before any process is started for it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder

from scheduler.config import EngineConfig
from server.config import StartupError

# Modules of which one is needed, and what to say where there is none. The words are the backends' own, which load the
# module much later, in the ranks.
_NEEDED: dict[str, tuple[tuple[str, ...], str]] = {
    "mooncake": (
        ("mooncake.engine",),
        "needs a package that is not installed: "
        "pip install 'lockstep[mooncake]', on hosts with CUDA 'lockstep[mooncake-cuda]'",
    ),
    "nixl": (
        ("nixl_cu13", "nixl_cu12"),
        "needs the package nixl-cu13 (or nixl-cu12): pip install 'lockstep[nixl]'",
    ),
}


def check(engine: EngineConfig) -> None:
    """StartupError when the backend's package is not installed. Nothing of it is imported.

    engine: of a prefill or a decode server, or of those of local mode.
    """
    backend = engine.disaggregation_transfer_backend
    modules, problem = _NEEDED.get(backend, ((), ""))
    if modules and not any(_exists(module) for module in modules):
        raise StartupError(f"--disaggregation-transfer-backend {backend} {problem}")


def _exists(module: str) -> bool:
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not rest:
        return spec is not None
    # find_spec of the whole name would import the package.
    return PathFinder.find_spec(module, spec.submodule_search_locations) is not None
