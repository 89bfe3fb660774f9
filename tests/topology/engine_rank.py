"""Engines of several ranks for parity tests: scenarios, and what they give on each rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import msgspec

from disagg.bootstrap import BootstrapServer
from layers import process_groups
from scheduler.config import EngineConfig
from scheduler.engine import Engine, Generation, resolve_device
from scheduler.hand_over import HandOverAddress
from scheduler.lockstep import Lockstep
from scheduler.messages import Bootstrap, GenerateRequest, RequestOutput, SamplingParams
from scheduler.step_plan import StepPlan, StepRow
from tests.rank_processes import GROUP_TIMEOUT, Place, run_ranks
from tests.scheduler.eager_recorder import EagerRecorder
from tests.topology.pair import joined

# More than the data-parallel ranks of any layout here: rooms that many apart belong to the same rank.
_ROOM_STRIDE = 16


class Scenario(msgspec.Struct, frozen=True):
    """Rounds of prompts through one engine, each round after the one before.

    params: for the prompts of each round in their order. options: GenerateRequest fields. With data-parallel attention
    the prompts of a round are dealt out to the groups in turn. An empty prompt is none, and keeps its group's turn.
    arrivals: for each round the step before which each prompt comes, or nothing where all come before the first.
    prefill_decode: the rank has two engines, one of each role, that step in turn and hand requests over.
    records: decode passes are recorded and replayed, as CUDA graphs are. With data-parallel attention alone.
    """

    config: EngineConfig
    rounds: list[list[list[int]]]
    params: list[SamplingParams]
    options: dict[str, int | bool] = {}
    arrivals: list[list[int]] = []
    prefill_decode: bool = False
    records: bool = False


class Result(msgspec.Struct):
    """What the rounds of a scenario gave, one after another.

    graph_sizes: of each step's plan, of data-parallel ranks with decode graphs. replays: of a scenario that records.
    """

    generations: list[Generation]
    retractions: int
    graph_sizes: list[int] = []
    replays: int = 0


class Job(msgspec.Struct):
    """bootstrap_port: of the bootstrap server of scenarios with two roles."""

    bootstrap_port: int
    scenarios: list[Scenario]


def run_scenario(
    scenario: Scenario,
    groups: process_groups.RankGroups = process_groups.ALONE,
    bootstrap_port: int = 0,
    incarnation: str = "",
) -> Result:
    """incarnation: names the engines of two roles; the same on all ranks, another for each scenario."""
    recorder = EagerRecorder() if scenario.records else None
    engines = _make_engines(scenario, groups, bootstrap_port, incarnation, recorder)
    graph_sizes: list[int] = []
    if engines[-1].lockstep is not None and engines[-1].runner.graphs is not None:
        _note_graph_sizes(engines[-1].lockstep, graph_sizes)
    if recorder is not None:
        recorder.replays = 0
    rank, size = groups.place.dp_rank, groups.layout.dp_size
    generations = []
    room = _ROOM_STRIDE
    for number, prompts in enumerate(scenario.rounds):
        arrivals = scenario.arrivals[number] if scenario.arrivals else [0] * len(prompts)
        requests = []
        for index, (prompt, params) in enumerate(zip(prompts, scenario.params, strict=False)):
            if prompt and index % size == rank:
                request = GenerateRequest(f"{number}-{index}", prompt, params, **scenario.options)  # type: ignore[arg-type]
                if scenario.prefill_decode:
                    bootstrap = Bootstrap("127.0.0.1", bootstrap_port, room + _ROOM_STRIDE * index + rank)
                    request = msgspec.structs.replace(request, bootstrap=bootstrap)
                requests.append((arrivals[index], request))
        room += _ROOM_STRIDE * len(prompts)
        generations += _run_round(engines, requests, max(arrivals))
    for engine in engines:
        engine.scheduler.check_memory()
        assert engine.hand_over is None or engine.hand_over.num_rooms == 0
        engine.close()
    replays = 0 if recorder is None else recorder.replays
    return Result(generations, engines[-1].scheduler.retractions_total, graph_sizes, replays)


def _note_graph_sizes(lockstep: Lockstep, sizes: list[int]) -> None:
    """Appends that of every step from now on in which ranks make a pass."""
    plan = lockstep.plan

    def noted(table: Sequence[StepRow]) -> StepPlan:
        made = plan(table)
        if made.runs:
            sizes.append(made.graph_size)
        return made

    lockstep.plan = noted  # type: ignore[method-assign]


def _make_engines(
    scenario: Scenario,
    groups: process_groups.RankGroups,
    bootstrap_port: int,
    incarnation: str,
    recorder: EagerRecorder | None,
) -> list[Engine]:
    if not scenario.prefill_decode:
        return [Engine(scenario.config, groups=groups, recorder=recorder)]
    engines = []
    for role, bootstrap in (("prefill", f"127.0.0.1:{bootstrap_port}"), ("decode", "")):
        config = msgspec.structs.replace(
            scenario.config, disaggregation_mode=role, num_reserved_decode_tokens=32, log_level="error"
        )
        own = recorder if role == "decode" else None
        engines.append(Engine(config, HandOverAddress(bootstrap, "127.0.0.1", f"{role} {incarnation}"), groups, own))
    return engines


def _run_round(engines: Sequence[Engine], requests: list[tuple[int, GenerateRequest]], last: int) -> list[Generation]:
    """Steps at least until the arrivals of all ranks, of which `last` is the latest, and until nobody has work."""
    said: dict[str, list[RequestOutput]] = {request.rid: [] for _, request in requests}
    step = 0
    while step <= last or not all(engine.is_idle for engine in engines):
        for arrival, request in requests:
            if arrival == step:
                for engine in engines:
                    engine.submit(request)
        for engine in engines:
            outputs = engine.step()
            if engine is engines[-1]:
                for output in outputs:
                    said[output.rid].append(output)
        if len(engines) > 1 and all(engine.is_stalled for engine in engines):
            time.sleep(0.0005)  # the transfer's threads need the processor
        step += 1
    return [joined(outputs) for outputs in said.values()]


def run_on_ranks(scenarios: list[Scenario], timeout: float = 230.0, **sizes: int | bool) -> list[list[Result]]:
    """The scenarios' results on each of the processes that are one engine.

    timeout: seconds for all of them. sizes: EngineConfig fields of the layout.
    """
    scenarios = [
        msgspec.structs.replace(scenario, config=msgspec.structs.replace(scenario.config, **sizes))
        for scenario in scenarios
    ]
    with closing(BootstrapServer("127.0.0.1", 0)) as bootstrap:
        return run_ranks(_run, scenarios[0].config.tp_size, Job(bootstrap.port, scenarios), timeout)


def _run(place: Place, job: Job) -> list[Result]:
    config = job.scenarios[0].config
    device = resolve_device(config.device, place.rank)
    groups = process_groups.build(config.layout(), place.rank, place.open_store(), device, GROUP_TIMEOUT)
    return [
        run_scenario(scenario, groups, job.bootstrap_port, str(number)) for number, scenario in enumerate(job.scenarios)
    ]
