"""The parity matrix: which combinations of sizes, backend and model are legal, and what is asked of each.

A launch is one set of processes, a layout of ranks. It runs every legal combination of that layout one after the other.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from layers.moe_options import A2A_BACKENDS
from scheduler.config import EngineConfig
from scheduler.messages import SamplingParams
from tests.models.mixtral_from_dense import convert
from tests.models.support import make_checkpoint, random_ids
from tests.topology.engine_rank import Result, Scenario

SIZES = (1, 2, 4)
# Family -> attention heads. SmolLM2's nine are whole on every rank here: they do not divide by 2 or 4.
HEADS = {"qwen3_moe": 4, "deepseek_v3": 4, "smollm2": 9}
SMOLLM2_LAYERS = 4

# (prompt tokens, new tokens) of a round, and for mixed arrivals the step before which each prompt comes. Dealt out in
# turn to up to four groups they make ranks extend, decode and idle in one step; before the last comes all are idle.
REQUESTS = ((45, 12), (5, 3), (1, 9), (33, 1), (50, 2), (17, 8), (29, 6))
ARRIVALS = (0, 0, 2, 3, 5, 9, 40)


@dataclass(frozen=True, order=True)
class Layout:
    tp_size: int
    dp_size: int
    ep_size: int

    def __str__(self) -> str:
        return f"tp{self.tp_size}-dp{self.dp_size}-ep{self.ep_size}"

    @property
    def sizes(self) -> dict[str, int | bool]:
        """EngineConfig fields."""
        sizes = {"tp_size": self.tp_size, "dp_size": self.dp_size, "ep_size": self.ep_size}
        return {**sizes, "enable_dp_attention": self.dp_size > 1}

    @property
    def is_legal(self) -> bool:
        return self.tp_size % self.dp_size == 0 and self.tp_size % self.ep_size == 0

    def takes(self, backend: str) -> bool:
        """Backends that send rows to their experts' ranks need whole experts on every rank."""
        return self.is_legal and (backend == "none" or self.ep_size == self.tp_size)

    def divides(self, family: str) -> bool:
        return HEADS[family] % (self.tp_size // self.dp_size) == 0


@dataclass(frozen=True)
class Case:
    """prefill_decode: each rank has an engine of either role. chunked: prompts in pieces, and steps that overlap."""

    layout: Layout
    family: str
    backend: str
    chunked: bool
    mixed_arrivals: bool
    prefill_decode: bool


LAYOUTS = [Layout(*sizes) for sizes in itertools.product(SIZES, repeat=3)]
LEGAL_LAYOUTS = [layout for layout in LAYOUTS if layout.is_legal]
CASES = [
    Case(layout, family, backend, *choices)
    for layout in LEGAL_LAYOUTS
    for family in HEADS
    if layout.divides(family)
    for backend in A2A_BACKENDS
    if layout.takes(backend)
    for choices in itertools.product((False, True), repeat=3)
]


def make_family(family: str, folder: Path, smollm2: Path) -> tuple[Path, Path]:
    """(checkpoint, checkpoint of its reference) in the folder. smollm2: the whole model.

    The reference of SmolLM2 as a mixture of copies of its MLPs is SmolLM2 itself, cut to as many layers.
    """
    if family != "smollm2":
        make_checkpoint(family, folder / family)
        return folder / family, folder / family
    first_layers(smollm2, folder / "dense", SMOLLM2_LAYERS)
    convert(folder / "dense", folder / family, num_experts=4)
    return folder / family, folder / "dense"


def first_layers(source: Path, target: Path, count: int) -> None:
    """A checkpoint of the first layers of another, with its embedding, last norm and head."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    shutil.copy(source / "generation_config.json", target)
    tensors = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < count}
    save_file(kept, target / "model.safetensors", {"format": "pt"})


def _layer(name: str) -> int:
    """Number of the layer that a tensor belongs to, -1 outside layers."""
    return int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else -1


def scenario(folder: Path, backend: str, *, chunked: bool, prefill_decode: bool) -> Scenario:
    """Two rounds through one engine: all requests at once, then others that come one by one."""
    settings: dict[str, Any] = {"chunked_prefill_size": 13, "disable_overlap_schedule": False} if chunked else {}
    config = EngineConfig(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_total_tokens=512,
        max_running_requests=8,
        context_length=96,
        moe_a2a_backend=backend,
        disaggregation_bootstrap_timeout=60.0,
        disaggregation_waiting_timeout=60.0,
        **settings,
    )
    rounds = [[random_ids(length, seed=seed + length) for length, _ in REQUESTS] for seed in (1000, 2000)]
    rounds[1][5] = rounds[0][5]  # from the cache of its group
    params = [SamplingParams(count, 0, temperature=0.0, ignore_eos=True) for _, count in REQUESTS]
    arrivals = [[0] * len(REQUESTS), list(ARRIVALS)]
    return Scenario(config, rounds, params, arrivals=arrivals, prefill_decode=prefill_decode)


def in_order(ranks: list[Result], dp_size: int) -> list[list[list[int]]]:
    """Tokens of the requests of each round in their order, from one rank of each group."""
    left = [[generation.token_ids for generation in result.generations] for result in ranks]
    rounds = [[left[number % dp_size].pop(0) for number in range(len(REQUESTS))] for _ in range(2)]
    assert not any(left)
    return rounds
