"""Thousands of random requests with arrivals, aborts and retraction: every output right, nothing leaked."""

from __future__ import annotations

import random

import pytest

from scheduler.messages import SamplingParams
from tests.scheduler.fake_runner import FakeEngine, expected_output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("total", [1_000, pytest.param(10_000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_soak(overlap: bool, total: int) -> None:
    rng = random.Random(20261130 + overlap)
    engine = FakeEngine(num_pages=26, context=96, max_requests=12, overlap=overlap, conservativeness=0.1, policy="lpm")
    stems = [[rng.randrange(50) for _ in range(40)] for _ in range(6)]
    sent: dict[str, tuple[list[int], SamplingParams]] = {}
    aborted: set[str] = set()
    count = 0
    while count < total or not engine.scheduler.is_idle or engine.pending is not None:
        for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
            if count == total:
                break
            stem = rng.choice(stems)[: rng.randrange(41)]
            prompt = stem + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
            params = SamplingParams(rng.choice([1, 2, 5, 12, 30]), 1, ignore_eos=rng.random() < 0.5)
            rid = f"r{count}"
            count += 1
            sent[rid] = (prompt, params)
            engine.submit(rid, prompt, max_new_tokens=params.max_new_tokens, ignore_eos=params.ignore_eos)
        if rng.random() < 0.1 and engine.scheduler.requests:
            victim = rng.choice(sorted(engine.scheduler.requests))
            aborted.add(victim)
            engine.scheduler.abort(victim)
        if rng.random() < 0.02:
            engine.scheduler.flush_cache()
        engine.step()
        engine.scheduler.check_memory()
    engine.step()
    got, ended = engine.tokens, engine.reasons
    assert set(ended) == set(sent)
    for rid, (prompt, params) in sent.items():
        expected = expected_output(prompt, params, engine.vocab, engine.eos)
        if ended[rid] == "abort":
            assert rid in aborted
            assert got.get(rid, []) == expected[: len(got.get(rid, []))]
        else:
            assert got[rid] == expected, rid
    assert engine.scheduler.retractions_total > total // 250
    assert engine.scheduler.cached_tokens_total > total // 5
    assert engine.scheduler.flush_cache()
    assert engine.memory.allocator.num_free == engine.memory.allocator.num_pages
