"""Schedulers of several data-parallel groups step together through random work: same collectives, nothing lost."""

from __future__ import annotations

import pytest

from layers.parallel_layout import ParallelLayout
from tests.rank_processes import run_ranks
from tests.scheduler.lockstep_rank import Job, Outcome, run
from tests.scheduler.simulation import Simulation


def simulate(tp_size: int, dp_size: int, steps: int, *, overlap: bool) -> Simulation:
    """A simulation that has run at least so many steps and met everything that can happen in one."""
    simulation = Simulation(ParallelLayout(tp_size, dp_size), seed=tp_size + overlap, overlap=overlap)
    simulation.run(steps)
    simulation.check()
    assert simulation.idle_steps > 30
    passes = simulation.ranks[0].passes
    counts = [rows.global_num_tokens for rows in passes]
    assert any(0 in row and max(row) > 4 for row in counts), "ranks idle while others extend"
    assert {rows.layout for rows in passes} == {"sum", "max"}, "graphs and eager passes"
    assert sum(rank.engine.scheduler.retractions_total for rank in simulation.ranks) > 0
    assert simulation.aborted
    return simulation


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize(("tp_size", "dp_size", "steps"), [(4, 4, 1_500), (8, 4, 800)])
def test_random_steps(tp_size: int, dp_size: int, steps: int, overlap: bool) -> None:
    simulation = simulate(tp_size, dp_size, steps, overlap=overlap)
    assert simulation.steps >= steps


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize(("tp_size", "dp_size"), [(4, 4), (6, 3), (8, 4), (8, 8)])
def test_a_hundred_thousand_random_steps(tp_size: int, dp_size: int, overlap: bool) -> None:
    simulation = simulate(tp_size, dp_size, 100_000, overlap=overlap)
    assert simulation.steps >= 100_000


def run_processes(tp_size: int, dp_size: int, steps: int, timeout: float) -> list[Outcome]:
    """Over gloo, where ranks wait for each other in truth: each group has requests while the others have few."""
    outcomes = run_ranks(run, tp_size, Job(ParallelLayout(tp_size, dp_size), steps), timeout)
    assert all(outcome.requests > steps // 20 and outcome.aborted > 0 for outcome in outcomes)
    return outcomes


def collectives(outcomes: list[Outcome]) -> set[tuple[int, int]]:
    """What each rank entered: how many passes, and a checksum of their sizes."""
    return {(outcome.passes, outcome.checksum) for outcome in outcomes}


@pytest.mark.timeout(120)
def test_random_steps_of_processes() -> None:
    outcomes = run_processes(4, 4, 400, timeout=100)
    assert len(collectives(outcomes)) == 1
    assert outcomes[0].passes > 200


@pytest.mark.sweep
@pytest.mark.timeout(660)
@pytest.mark.parametrize(("tp_size", "dp_size"), [(4, 4), (4, 2), (8, 4), (8, 8)])
def test_thousands_of_random_steps_of_processes(tp_size: int, dp_size: int) -> None:
    outcomes = run_processes(tp_size, dp_size, 5_000, timeout=600)
    assert len(collectives(outcomes)) == 1
    assert outcomes[0].passes > 2_500
