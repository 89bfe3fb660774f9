"""One rank of a random run in a process of its own, over gloo."""

from __future__ import annotations

import random
import zlib

import msgspec
import torch

from layers import process_groups
from layers.parallel_layout import ParallelLayout
from scheduler.lockstep import Lockstep
from scheduler.messages import GenerateRequest, SamplingParams
from tests.rank_processes import GROUP_TIMEOUT, Place
from tests.scheduler.fake_runner import FakeEngine
from tests.scheduler.simulation import Rank


class Job(msgspec.Struct):
    layout: ParallelLayout
    steps: int


class Outcome(msgspec.Struct):
    """passes: how many the rank took part in, and a checksum of what they were. requests, aborted: of its group."""

    passes: int
    checksum: int
    requests: int
    aborted: int


def run(place: Place, job: Job) -> Outcome:
    groups = process_groups.build(
        job.layout, place.rank, place.open_store(), torch.device("cpu"), timeout=GROUP_TIMEOUT
    )
    # Groups need not have the same loop; the ranks of one do.
    overlap = groups.dp_rank % 2 == 0
    engine = FakeEngine(num_pages=16, context=64, max_requests=6, conservativeness=0.0, overlap=overlap)
    rank = Rank(groups.dp_rank, engine, Lockstep(groups, (1, 2, 4)))
    # Ranks of a group get the same requests.
    rng = random.Random(groups.dp_rank)
    sent: dict[str, GenerateRequest] = {}
    aborted: set[str] = set()
    steps = 0
    while steps < job.steps or rank.lockstep.is_busy:
        if steps < job.steps and rng.random() < (0.3 if steps // 50 % 3 == groups.dp_rank % 3 else 0.0):
            prompt = [rng.randrange(50) for _ in range(rng.choice([1, 3, 17, 40]))]
            request = GenerateRequest(f"r{len(sent)}", prompt, SamplingParams(rng.choice([1, 2, 24]), 1))
            sent[request.rid] = request
            engine.scheduler.add(request)
        if engine.scheduler.requests and rng.random() < 0.02:
            victim = rng.choice(sorted(engine.scheduler.requests))
            aborted.add(victim)
            engine.scheduler.abort(victim)
        batch = engine.scheduler.next_batch()
        plan = rank.lockstep.agree(engine.scheduler, batch, rank.outputs, engine.pending is not None)
        rank.run(batch, plan)
        engine.scheduler.check_memory()
        steps += 1
    rank.check(sent, aborted)
    return Outcome(len(rank.passes), zlib.crc32(repr(rank.passes).encode()), len(sent), len(aborted))
