"""Every legal combination of sizes, backend and model gives the tokens of one process; every other is refused.

`pytest -m sweep tests/topology/test_parity_matrix.py` runs them; the other tests of this folder are a selection.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import msgspec
import pytest

import models
from layers.moe_options import A2A_BACKENDS
from layers.parallel import ParallelGroup, ParallelGroups
from models.errors import ModelError
from scheduler.config import EngineConfig
from tests.topology import parity
from tests.topology.engine_rank import run_on_ranks, run_scenario
from tests.topology.parity import CASES, HEADS, LAYOUTS, LEGAL_LAYOUTS, Case, Layout

# The two best logits of a step must differ by more than layouts can (rounding of sums in another order).
SMALLEST_MARGIN = 1e-3


class References:
    """Checkpoints and the tokens of each round, from one process without any of the options; made when first asked."""

    def __init__(self, folder: Path, smollm2: Path) -> None:
        self._folder, self._smollm2 = folder, smollm2
        self._made: dict[str, tuple[Path, list[list[list[int]]]]] = {}

    def checkpoint(self, family: str) -> Path:
        return self._get(family)[0]

    def tokens(self, family: str) -> list[list[list[int]]]:
        return self._get(family)[1]

    def _get(self, family: str) -> tuple[Path, list[list[list[int]]]]:
        if family not in self._made:
            checkpoint, reference = parity.make_family(family, self._folder, self._smollm2)
            plain = parity.scenario(reference, "none", chunked=False, prefill_decode=False)
            result = run_scenario(msgspec.structs.replace(plain, options={"logprobs": True, "top_logprobs": 2}))
            for generation in result.generations:
                for (_, best), (_, second) in generation.top_logprobs:
                    assert best - second > SMALLEST_MARGIN, f"{family}: a near tie, choose other prompts"
            self._made[family] = checkpoint, parity.in_order([result], 1)
        return self._made[family]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> References:
    return References(tmp_path_factory.mktemp("parity"), smollm2_path)


def check(layout: Layout, cases: list[Case], references: References) -> None:
    """One launch for all cases of the layout; those that differ in arrivals only are rounds of one engine."""

    def engine(case: Case) -> tuple[str, str, bool, bool]:
        return case.family, case.backend, case.chunked, case.prefill_decode

    engines = [key for key, _ in groupby(sorted(cases, key=engine), key=engine)]
    scenarios = [
        parity.scenario(references.checkpoint(family), backend, chunked=chunked, prefill_decode=prefill_decode)
        for family, backend, chunked, prefill_decode in engines
    ]
    by_rank = run_on_ranks(scenarios, timeout=1700.0, **layout.sizes)
    stride = layout.tp_size // layout.dp_size
    for case in cases:
        results = [results[engines.index(engine(case))] for results in by_rank]
        for first in range(stride):
            rounds = parity.in_order(results[first::stride], layout.dp_size)
            got, wanted = rounds[case.mixed_arrivals], references.tokens(case.family)[case.mixed_arrivals]
            assert got == wanted, f"{case}, ranks {first} of their groups"


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LEGAL_LAYOUTS, ids=str)
def test_every_combination(layout: Layout, references: References) -> None:
    check(layout, [case for case in CASES if case.layout == layout], references)


def test_the_matrix_has_every_combination_once() -> None:
    """27 layouts of which 14 divide, 6 of these with whole experts; SmolLM2's heads leave 6, 3 with whole experts."""
    assert (len(LAYOUTS), len(LEGAL_LAYOUTS)) == (27, 14)
    by_family = {family: sum(case.family == family for case in CASES) // 8 for family in HEADS}
    assert by_family == {"qwen3_moe": 14 + 6 + 6, "deepseek_v3": 14 + 6 + 6, "smollm2": 6 + 3 + 3}
    assert len(set(CASES)) == len(CASES) == 8 * (26 + 26 + 12)


@pytest.mark.parametrize("backend", A2A_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_does_not_fit_is_refused_with_both_sizes(layout: Layout, backend: str) -> None:
    config = EngineConfig(
        model_path="tiny-qwen3-moe", moe_a2a_backend=backend, **{**layout.sizes, "enable_dp_attention": True}
    )
    if layout.takes(backend):
        config.moe_options()
        return
    tp = f"--tp-size {layout.tp_size}"
    if layout.tp_size % layout.dp_size:
        words = (tp, f"--dp-size {layout.dp_size}")
    elif layout.tp_size % layout.ep_size:
        words = (tp, f"--ep-size {layout.ep_size}")
    else:
        words = (f"--moe-a2a-backend {backend}", f"--ep-size {layout.ep_size}", tp)
    with pytest.raises(ValueError, match="multiple of|whole experts") as caught:
        config.moe_options()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("size", [2, 4])
def test_heads_that_do_not_divide_are_refused(size: int, smollm2_path: Path) -> None:
    groups = ParallelGroups(attention=ParallelGroup(0, size), dense=ParallelGroup(0, size))
    with pytest.raises(ModelError, match=rf"_heads is [39], which .* (into|over) {size} ranks"):
        models.load_model(str(smollm2_path), groups=groups)
