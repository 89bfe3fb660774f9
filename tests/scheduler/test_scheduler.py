"""The scheduler with a runner that knows every token: what runs in which step, and what becomes of each request."""

from __future__ import annotations

import pytest

from scheduler.messages import SamplingParams
from tests.scheduler.fake_runner import FakeEngine, expected_output

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def check_outputs(engine: FakeEngine, prompts: dict[str, list[int]], **params: int | bool) -> None:
    for rid, prompt in prompts.items():
        engine.submit(rid, prompt, **params)
    got = engine.run()
    sampling = SamplingParams(**{"max_new_tokens": 8, "seed": 1, **params})
    for rid, prompt in prompts.items():
        assert got[rid][0] == expected_output(prompt, sampling, engine.vocab, engine.eos), rid
    engine.scheduler.check_memory()


def prompts_of(count: int, length: int, start: int = 0) -> dict[str, list[int]]:
    return {f"r{start + i}": [(start + i * 13 + j * 7) % 50 for j in range(length + i % 5)] for i in range(count)}


@BOTH_LOOPS
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 33])
def test_tokens_do_not_depend_on_chunks(length: int, overlap: bool) -> None:
    check_outputs(FakeEngine(overlap=overlap), prompts_of(6, length))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [None, 1, 3, 64, 65, 500])
def test_limits_that_do_not_fit_together_serve_all_the_same(chunk: int | None, page_size: int) -> None:
    """Chunks below a page or above the 64 prompt tokens of a step, and prompts around that limit and far over it."""
    engine = FakeEngine(num_pages=512 // page_size, page_size=page_size, context=256, chunk=chunk)
    prompts = {f"{length}": [(length + 7 * i) % 50 for i in range(length)] for length in (63, 64, 65, 128, 129, 200)}
    check_outputs(engine, prompts)


@BOTH_LOOPS
def test_length_finish_launches_no_further_row(overlap: bool) -> None:
    engine = FakeEngine(overlap=overlap, eos=())
    engine.submit("a", [1, 2, 3], max_new_tokens=4)
    assert engine.run()["a"][1] == "length"
    assert [batch.num_tokens for batch in engine.batches] == [3, 1, 1, 1]


@BOTH_LOOPS
def test_retracted_requests_continue_with_the_same_tokens(overlap: bool) -> None:
    engine = FakeEngine(num_pages=16, context=64, overlap=overlap, eos=(), conservativeness=0.0)
    check_outputs(engine, prompts_of(8, 6), max_new_tokens=40)
    assert engine.scheduler.retractions_total > 0


def test_retraction_takes_the_least_output_and_never_the_last() -> None:
    engine = FakeEngine(num_pages=8, context=32, eos=(), prefix_cache=False, conservativeness=0.0)
    engine.submit("old", [1, 2, 3, 4], max_new_tokens=28)
    for _ in range(6):
        engine.step()
    engine.submit("young", [9] * 8, max_new_tokens=1)
    engine.submit("younger", [8] * 4, max_new_tokens=8)
    got = engine.run()
    assert engine.scheduler.requests == {}
    assert {rid: len(tokens) for rid, (tokens, _) in got.items()} == {
        "old": 28,
        "young": 1,
        "younger": 8,
    }
    first_rows = {item.request.rid: 0 for batch in engine.batches for item in batch.items}
    for batch in engine.batches:
        for item in batch.items:
            first_rows[item.request.rid] += item.start == 0
    assert first_rows["old"] == 1  # it was never computed a second time


def test_full_prefix_hit_computes_at_least_one_token() -> None:
    engine = FakeEngine()
    prompt = list(range(16))
    engine.submit("a", prompt)
    engine.run()
    engine.batches.clear()
    engine.submit("b", prompt)
    got = engine.run()
    assert got["b"][0] == expected_output(prompt, SamplingParams(8, 1), 50, (7,))
    assert engine.batches[0].items[0].start == 12  # three of four pages: the last token must be computed
    assert engine.scheduler.cached_tokens_total == 12


def test_samples_of_one_prompt_compute_it_once() -> None:
    engine = FakeEngine(chunk=64)
    prompt = list(range(1, 22))
    for i in range(4):
        engine.submit(f"s{i}", prompt)
    got = engine.run()
    assert len({tuple(tokens) for tokens, _ in got.values()}) == 1
    prefill = [item for batch in engine.batches for item in batch.items if not item.is_decode]
    assert sorted(item.num_tokens for item in prefill) == [1, 1, 1, 21]


def test_one_prompt_is_chunked_at_a_time_and_goes_first() -> None:
    engine = FakeEngine(chunk=16, eos=())
    engine.submit("long", list(range(40)), max_new_tokens=1)
    engine.submit("short", [5, 6, 7], max_new_tokens=1)
    engine.run()
    rows = [[(item.request.rid, item.start, item.end) for item in batch.items] for batch in engine.batches]
    assert rows == [[("long", 0, 16)], [("long", 16, 32)], [("long", 32, 40), ("short", 0, 3)]]


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    engine = FakeEngine(eos=())
    engine.submit("a", [1, 2, 3], max_new_tokens=12)
    engine.step()
    engine.submit("b", list(range(48)), max_new_tokens=1)
    for _ in range(3):
        outputs = engine.step()
        assert "a" in [output.rid for output in outputs]


def test_lpm_prefers_the_longest_cached_prefix() -> None:
    engine = FakeEngine(policy="lpm", max_requests=1)
    engine.submit("seed", list(range(20)), max_new_tokens=1)
    engine.run()
    engine.batches.clear()
    engine.submit("cold", [9, 9, 9, 9, 9], max_new_tokens=1)
    engine.submit("warm", list(range(20)), max_new_tokens=1)
    engine.run()
    assert [batch.items[0].request.rid for batch in engine.batches] == ["warm", "cold"]


@BOTH_LOOPS
def test_abort_frees_memory_wherever_the_request_is(overlap: bool) -> None:
    engine = FakeEngine(overlap=overlap, max_requests=2, eos=())
    for rid, prompt in prompts_of(4, 30).items():
        engine.submit(rid, prompt, max_new_tokens=20)
    engine.step()
    engine.scheduler.abort("r0")  # between its chunks
    engine.scheduler.abort("r3")  # waiting
    engine.scheduler.abort("nobody")
    for _ in range(5):
        engine.step()
    engine.scheduler.abort("r1")  # decoding
    engine.scheduler.abort("r1")
    got = engine.run()
    assert got["r2"] == (expected_output(prompts_of(4, 30)["r2"], SamplingParams(20, 1), 50, ()), "length")
    engine.scheduler.check_memory()
    assert engine.scheduler.flush_cache()
    assert engine.memory.allocator.num_free == engine.memory.allocator.num_pages


def test_aborted_prompt_stops_holding_back_equal_ones() -> None:
    engine = FakeEngine(chunk=8)
    prompt = list(range(40))
    engine.submit("first", prompt, max_new_tokens=2)
    engine.submit("second", prompt, max_new_tokens=2)
    engine.step()
    engine.scheduler.abort("first")
    assert engine.run()["second"][0] == expected_output(prompt, SamplingParams(2, 1), 50, (7,))


def test_refusals_name_the_limit() -> None:
    engine = FakeEngine(queued=1, context=32)
    engine.submit("long", [1] * 30, max_new_tokens=3)
    engine.submit("empty", [])
    engine.submit("foreign", [50])
    engine.submit("ok", [1])
    engine.submit("late", [1])
    finishes = {output.rid: output.finish for output in engine.scheduler.take_early_outputs()}
    assert {rid: finish.status for rid, finish in finishes.items()} == {
        "long": 400,
        "empty": 400,
        "foreign": 400,
        "late": 503,
    }
    assert "30 prompt tokens + 3 new tokens exceed the limit of 32" in finishes["long"].message
    assert "--max-queued-requests" in finishes["late"].message


@BOTH_LOOPS
def test_nan_ends_one_request_and_its_kv_is_not_kept(overlap: bool) -> None:
    engine = FakeEngine(overlap=overlap)
    engine.runner.nan_rids.add("bad")
    engine.submit("bad", list(range(20)))
    engine.submit("good", list(range(20, 40)))
    got = engine.run()
    assert got["bad"] == ([], "abort")
    assert got["good"][0] == expected_output(list(range(20, 40)), SamplingParams(8, 1), 50, (7,))
    assert engine.memory.cache.num_pages == (20 + len(got["good"][0]) - 1) // 4


def test_scoring_only_request_finishes_without_a_token() -> None:
    engine = FakeEngine()
    engine.submit("score", list(range(9)), max_new_tokens=0)
    assert engine.run() == {"score": ([], "length")}
    engine.scheduler.check_memory()


def test_explicit_stop_ids_stop_even_with_ignore_eos() -> None:
    prompt = [3, 1, 4]
    full = expected_output(prompt, SamplingParams(8, 1, ignore_eos=True), 50, (7,))
    engine = FakeEngine()
    engine.submit("a", prompt, stop_token_ids=(full[3],), ignore_eos=True)
    assert engine.run()["a"] == (full[: full.index(full[3]) + 1], "stop")
