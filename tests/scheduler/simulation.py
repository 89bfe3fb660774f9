"""The real schedulers and planners of all ranks of an engine, stepped together through random work.

A runner without a model stands in for the forward pass (`tests.scheduler.fake_runner`); `Rank.passes` records the
collectives that a rank would have entered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from layers.forward_batch import StepRows
from layers.parallel_layout import ParallelLayout
from layers.process_groups import RankGroups
from scheduler.batch import Batch
from scheduler.lockstep import Lockstep
from scheduler.messages import GenerateRequest, RequestOutput, SamplingParams
from scheduler.step_plan import StepPlan
from tests.scheduler.fake_runner import FakeEngine, FakePending, expected_output


@dataclass
class Rank:
    """One rank: the real scheduler and its side of the agreement; `passes` are the collectives it entered."""

    dp_rank: int
    engine: FakeEngine
    lockstep: Lockstep
    outputs: list[RequestOutput] = field(default_factory=list)
    passes: list[StepRows] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return not self.lockstep.is_busy and self.engine.scheduler.is_idle and self.engine.pending is None

    def run(self, batch: Batch | None, plan: StepPlan) -> None:
        """The rest of a step, as the engine does it."""
        engine, rows = self.engine, plan.rows()
        if plan.runs:
            self.passes.append(rows)
        own = 0 if batch is None else batch.num_tokens
        assert rows.global_num_tokens[self.dp_rank] == own
        launched: FakePending | None = None if batch is None else engine.runner.launch(batch)
        finished, engine.pending = (engine.pending, launched) if engine.overlap else (launched, None)
        self.outputs = engine.scheduler.take_early_outputs()
        if finished is not None:
            self.outputs += engine.scheduler.process(finished.batch, finished.wait())
        for output in self.outputs:
            assert output.rid not in engine.reasons, f"output for {output.rid} after its end"
            engine.tokens.setdefault(output.rid, []).extend(output.token_ids)
            if output.finish is not None:
                engine.reasons[output.rid] = output.finish.reason

    def check(self, sent: dict[str, GenerateRequest], aborted: set[str]) -> None:
        """After the last step: each request that was sent has ended as it had to, and nothing is left of any."""
        engine = self.engine
        assert set(engine.reasons) == set(sent)
        for rid, request in sent.items():
            expected = expected_output(request.input_ids, request.sampling, engine.vocab, engine.eos)
            got = engine.tokens.get(rid, [])
            if engine.reasons[rid] == "abort":
                assert rid in aborted and got == expected[: len(got)]
            else:
                assert got == expected, rid
        assert engine.scheduler.flush_cache()
        assert engine.memory.allocator.num_free == engine.memory.allocator.num_pages


class Simulation:
    """All ranks of an engine in this thread, and the requests each group was sent."""

    def __init__(
        self, layout: ParallelLayout, seed: int, *, overlap: bool, graph_sizes: tuple[int, ...] = (1, 2, 4)
    ) -> None:
        self.rng = random.Random(seed)
        self.ranks = [
            Rank(
                layout.place(rank).dp_rank,
                FakeEngine(num_pages=16, context=64, max_requests=6, conservativeness=0.0, overlap=overlap),
                Lockstep(RankGroups(layout, rank), graph_sizes),
            )
            for rank in range(layout.tp_size)
        ]
        self.dp_size = layout.dp_size
        self.sent: list[dict[str, GenerateRequest]] = [{} for _ in range(layout.dp_size)]
        self.aborted: set[str] = set()
        self.steps = 0
        self.idle_steps = 0

    def step(self, arrivals: float) -> None:
        """arrivals: probability of a new request for a group."""
        has_messages = False
        for dp_rank in range(self.dp_size):
            for action in self.messages(dp_rank, arrivals):
                has_messages = True
                for rank in self.ranks:
                    if rank.dp_rank == dp_rank:
                        if isinstance(action, GenerateRequest):
                            rank.engine.scheduler.add(action)
                        else:
                            rank.engine.scheduler.abort(action)
        # What the leader decides: with nothing to do and no message nobody steps.
        is_busy = {not rank.is_idle for rank in self.ranks if not has_messages}
        if not has_messages and is_busy == {False}:
            self.idle_steps += 1
            return
        assert has_messages or self.ranks[0].lockstep.is_busy or self.ranks[0].engine.pending is not None
        batches = [rank.engine.scheduler.next_batch() for rank in self.ranks]
        table = [
            rank.lockstep.row(rank.engine.scheduler, batch, rank.outputs, rank.engine.pending is not None)
            for rank, batch in zip(self.ranks, batches, strict=True)
        ]
        plans = [rank.lockstep.plan(table) for rank in self.ranks]
        assert all(plan == plans[0] for plan in plans)
        for rank, batch, plan in zip(self.ranks, batches, plans, strict=True):
            rank.run(batch, plan)
            rank.engine.scheduler.check_memory()
        self.steps += 1

    def messages(self, dp_rank: int, arrivals: float) -> Iterator[GenerateRequest | str]:
        rng, sent = self.rng, self.sent[dp_rank]
        if rng.random() < arrivals:
            prompt = [rng.randrange(50) for _ in range(rng.choice([1, 3, 16, 17, 40]))]
            params = SamplingParams(rng.choice([1, 2, 10, 24]), 1, ignore_eos=rng.random() < 0.5)
            request = GenerateRequest(f"{dp_rank}-{len(sent)}", prompt, params)
            sent[request.rid] = request
            yield request
        live = sorted(next(rank for rank in self.ranks if rank.dp_rank == dp_rank).engine.scheduler.requests)
        if live and rng.random() < 0.02:
            victim = rng.choice(live)
            self.aborted.add(victim)
            yield victim

    def run(self, steps: int) -> None:
        """At least so many steps, in bursts and lulls: groups run dry one after the other and all together."""
        while self.steps < steps:
            arrivals = self.rng.choice([0.0, 0.0, 0.02, 0.3])
            for _ in range(self.rng.randrange(1, 60)):
                self.step(arrivals)
        self.drain()

    def drain(self) -> None:
        for _ in range(10_000):
            self.step(arrivals=0.0)
            if all(rank.is_idle for rank in self.ranks):
                return
        raise AssertionError("not idle after ten thousand steps")

    def check(self) -> None:
        for rank in self.ranks:
            assert rank.passes == self.ranks[0].passes
            rank.check(self.sent[rank.dp_rank], self.aborted)
