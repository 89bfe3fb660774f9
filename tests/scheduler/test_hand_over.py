"""Requests handed from a prefill to a decode scheduler: every token right, nothing leaked, whatever goes wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from disagg.base import KVPoll
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.messages import Bootstrap, GenerateRequest, SamplingParams
from tests.scheduler.fake_pair import OPTIONS, FakePair, params, prefill_until, prompt_of, receive, until
from tests.scheduler.fake_runner import expected_output

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pair() -> Iterator[FakePair]:
    made = FakePair()
    yield made
    made.close()


@pytest.mark.parametrize("loops", ["plain", "overlap"])
@pytest.mark.parametrize("cache", ["decode keeps prefixes", "decode keeps none"])
def test_soak(loops: str, cache: str) -> None:
    """Random arrivals, aborts on one or both sides, retraction: tokens and memory are right at every step."""
    overlap = loops == "overlap"
    pair = FakePair(
        prefill={"num_pages": 40},
        decode={"num_pages": 30, "prefix_cache": cache == "decode keeps prefixes"},
        context=96,
        max_requests=12,
        overlap=overlap,
        reserved_tokens=2,
    )
    rng = random.Random(20261130 + overlap)
    stems = [prompt_of(40, seed) for seed in range(6)]
    sent: dict[str, tuple[list[int], SamplingParams]] = {}
    aborted: set[str] = set()
    total = 250
    while len(sent) < total or not pair.is_idle:
        for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
            if len(sent) == total:
                break
            prompt = rng.choice(stems)[: rng.randrange(41)] + prompt_of(rng.randrange(1, 12), rng.randrange(10**6))
            rid = f"r{len(sent)}"
            sent[rid] = (prompt, SamplingParams(rng.choice([0, 1, 2, 5, 12, 30]), 1, ignore_eos=rng.random() < 0.5))
            pair.submit(rid, *sent[rid])
        if rng.random() < 0.15:
            live = sorted({rid for side in pair.sides for rid in side.scheduler.requests})
            if live:
                victim = rng.choice(live)
                aborted.add(victim)
                for side in rng.choice([pair.sides, pair.sides[:1], pair.sides[1:]]):
                    side.scheduler.abort(victim)
        pair.step_or_rest()
        for side in pair.sides:
            side.scheduler.check_memory()
    for rid, (prompt, sampling) in sent.items():
        expected = expected_output(prompt, sampling, pair.decode.vocab, pair.decode.eos)
        got = pair.decode.tokens.get(rid, [])
        if pair.decode.reasons[rid] == "abort":
            assert rid in aborted, pair.decode.messages[rid]
            assert got == expected[: len(got)]
        else:
            assert got == expected, rid
            if rid not in aborted:  # an abort may have come when only the confirmation was missing
                assert pair.prefill.tokens.get(rid, []) == expected[:1]
    decode = pair.decode.scheduler
    assert decode.retractions_total > 3
    assert decode.cached_tokens_total > 200
    pair.check_drained()
    pair.close()


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
@pytest.mark.parametrize("state", ["connecting", "prefilling", "sending", "receiving", "decoding"])
def test_abort_in_every_state_leaves_nothing(pair: FakePair, state: str, side: str) -> None:
    prompt = prompt_of(60)
    pair.submit("r", prompt, params(20))
    until(pair, "r", state)
    for each in pair.sides if side == "both" else [getattr(pair, side)]:
        each.scheduler.abort("r")
    pair.run()
    got, reason = pair.decode.tokens["r"], pair.decode.reasons["r"]
    assert reason == "abort" or (side == "prefill" and got == expected_output(prompt, params(20), 50, ()))
    pair.submit("probe", prompt, params())
    pair.run()
    assert pair.decode.tokens["probe"] == expected_output(prompt, params(), 50, ())
    pair.check_drained()


def test_abort_of_the_prefill_side_reaches_the_decode_side_with_its_reason(pair: FakePair) -> None:
    pair.submit("r", prompt_of(60), params())
    until(pair, "r", "prefilling")
    pair.prefill.scheduler.abort("r")
    messages = []
    while "r" in pair.decode.scheduler.requests:
        messages += [output.finish for output in pair.decode.step() if output.finish is not None]
    assert [(finish.reason, finish.status) for finish in messages] == [("abort", 500)]
    assert "aborted" in messages[0].message


def test_nan_on_the_prefill_side_fails_that_request_alone(pair: FakePair) -> None:
    pair.prefill.runner.nan_rids.add("bad")
    pair.submit("bad", prompt_of(30, 1), params())
    pair.submit("good", prompt_of(30, 2), params())
    pair.run()
    assert pair.decode.reasons == {"bad": "abort", "good": "length"}
    assert pair.decode.tokens["good"] == expected_output(prompt_of(30, 2), params(), 50, ())
    pair.check_drained()


def test_500_requests_at_a_pool_that_holds_5() -> None:
    pair = FakePair(prefill={"num_pages": 50}, decode={"num_pages": 50}, max_requests=5)
    prompts = {f"r{i}": prompt_of(20 + i % 10, i) for i in range(500)}
    for rid, prompt in prompts.items():
        pair.submit(rid, prompt, params(4))
    pair.run(100)
    for rid, prompt in prompts.items():
        assert pair.decode.tokens[rid] == expected_output(prompt, params(4), 50, ())
    pair.check_drained()
    pair.close()


def test_decode_takes_in_by_arrival_and_stops_at_the_first_that_does_not_fit() -> None:
    """Statement 13: nobody overtakes; a reserve is kept for each resident request."""
    pair = FakePair(decode={"num_pages": 20, "context": 80}, reserved_tokens=8)  # 80 tokens
    decode = pair.decode.scheduler
    assert isinstance(decode, DecodeScheduler)
    pair.submit("first", prompt_of(40, 1), params(20))
    until(pair, "first", "decoding")
    pair.submit("big", prompt_of(40, 2), params(20))
    pair.submit("small", prompt_of(4, 3), params(20))
    prefill_until(pair, decode.connecting, KVPoll.WaitingForInput)
    pair.step()
    assert [request.rid for request in decode.connecting] == ["big", "small"]
    pair.run()
    assert pair.decode.tokens["small"] == expected_output(prompt_of(4, 3), params(20), 50, ())
    pair.check_drained()
    pair.close()


def test_no_request_is_taken_in_or_over_while_a_retracted_one_waits() -> None:
    """Statement 13, its second half."""
    pair = FakePair(decode={"num_pages": 12, "context": 48}, reserved_tokens=0)
    decode = pair.decode.scheduler
    assert isinstance(decode, DecodeScheduler)
    for i in range(6):
        pair.submit(f"r{i}", prompt_of(12, i), params(24))
    receive(pair)
    seen = False
    limit = time.monotonic() + 60
    while not pair.is_idle:
        before = {request.rid for request in decode.decoding + decode.prefilling}
        retracted = bool(decode.waiting) and not decode._stalled
        connecting = [request.rid for request in decode.connecting]
        pair.prefill.step()
        # Only the step that sees the retracted request waiting, with others running, is bound by the rule.
        decode._before_step()
        if retracted and before:
            seen = True
            assert [r.rid for r in decode.connecting] == connecting
            assert {r.rid for r in decode.decoding + decode.prefilling} <= before
        pair.decode.step()
        assert time.monotonic() < limit
    assert seen
    for i in range(6):
        assert pair.decode.tokens[f"r{i}"] == expected_output(prompt_of(12, i), params(24), 50, ())
    pair.check_drained()
    pair.close()


@pytest.mark.parametrize("room", [0, -1, 2**63])
def test_rooms_that_are_none_are_refused_on_both_sides(pair: FakePair, room: int) -> None:
    request = GenerateRequest("r", prompt_of(5), params(), bootstrap=Bootstrap("127.0.0.1", 1, room))
    for side in pair.sides:
        side.scheduler.add(request)
        (output,) = side.step()
        assert output.finish is not None
        assert (output.finish.status, str(room) in output.finish.message) == (400, True)
    pair.check_drained()


def test_a_live_room_is_refused_and_its_owner_undisturbed(pair: FakePair) -> None:
    pair.submit("owner", prompt_of(60), params())
    until(pair, "owner", "prefilling")
    bootstrap = pair.decode.scheduler.requests["owner"].message.bootstrap
    assert bootstrap is not None
    for side in pair.sides:
        side.scheduler.add(GenerateRequest("thief", prompt_of(7), params(), bootstrap=bootstrap))
        finishes = [output.finish for output in side.step() if output.rid == "thief"]
        assert finishes[0] is not None and finishes[0].status == 400
        assert f"room {bootstrap.room} is in use" in finishes[0].message
    pair.run()
    assert pair.decode.tokens["owner"] == expected_output(prompt_of(60), params(), 50, ())
    pair.check_drained()


def test_a_missing_room_is_refused(pair: FakePair) -> None:
    for side in pair.sides:
        side.scheduler.add(GenerateRequest("r", prompt_of(5), params()))
        (output,) = side.step()
        assert output.finish is not None and output.finish.status == 400
        assert "bootstrap_room" in output.finish.message


def test_a_prompt_over_the_prefill_limit_fails_on_both_sides_at_once() -> None:
    pair = FakePair(prefill={"context": 40})
    pair.submit("long", prompt_of(60), params())
    began = time.monotonic()
    pair.run()
    assert time.monotonic() - began < OPTIONS.bootstrap_timeout / 2
    assert (pair.prefill.reasons, pair.decode.reasons) == ({"long": "abort"}, {"long": "abort"})
    pair.check_drained()
    pair.close()


def test_a_prompt_over_the_decode_limit_fails_on_both_sides() -> None:
    pair = FakePair(decode={"context": 40})
    pair.submit("long", prompt_of(60), params())
    assert pair.decode.scheduler.is_idle
    # The router leaves; that is what tells the prefill server.
    pair.prefill.scheduler.abort("long")
    pair.run()
    assert (pair.prefill.reasons, pair.decode.reasons) == ({"long": "abort"}, {"long": "abort"})
    pair.check_drained()
    pair.close()


def test_a_corrupt_metadata_row_fails_that_request_alone(pair: FakePair) -> None:
    """Statement 9: a wrong room in the row is a 500 of its request."""
    decode = pair.decode.scheduler
    assert isinstance(decode, DecodeScheduler)
    pair.submit("bad", prompt_of(20, 1), params())
    until(pair, "bad", "sending")
    request = decode.requests["bad"]
    prefill_until(pair, [request], KVPoll.Success)
    assert request.residence is not None
    decode.hand_over.rows.array[request.residence.row, 0] += 1
    pair.submit("good", prompt_of(20, 2), params())
    pair.run()
    assert pair.decode.reasons == {"bad": "abort", "good": "length"}
    assert not decode.hand_over.rows.array.any()  # a row's next owner finds it empty
    pair.check_drained()


def test_a_slow_decode_side_does_not_time_out_the_prefill_side() -> None:
    """The decode side has no memory for longer than bootstrap_timeout, but answers."""
    options = replace(OPTIONS, bootstrap_timeout=2)
    pair = FakePair(decode={"num_pages": 10, "context": 40}, options=options)
    prefill = pair.prefill.scheduler
    pair.submit("first", prompt_of(20, 1), params(20))
    pair.submit("second", prompt_of(20, 2), params(20))
    until(pair, "first", "decoding")
    limit = time.monotonic() + 2.5
    while time.monotonic() < limit:
        pair.prefill.step()
        assert "second" in prefill.requests
        time.sleep(0.01)
    pair.run()
    assert pair.decode.tokens["second"] == expected_output(prompt_of(20, 2), params(20), 50, ())
    pair.check_drained()
    pair.close()


def test_pages_are_offered_only_after_the_steps_launched_before_have_run() -> None:
    """A launched step may still write a page whose request has ended; the transfer into it must come later."""
    pair = FakePair(decode={"num_pages": 4, "context": 16, "overlap": True, "eos": (expected_eos(),)})
    decode = pair.decode.scheduler
    assert isinstance(decode, DecodeScheduler)
    pair.submit("ends", prompt_of(9, 1), SamplingParams(7, 1))
    pair.submit("next", prompt_of(9, 2), SamplingParams(4, 1, ignore_eos=True))
    limit = time.monotonic() + 60
    while "next" not in [request.rid for request in decode.receiving]:
        pair.step_or_rest()
        assert time.monotonic() < limit
    # The step just launched is not the first after "ends" had ended: that one has a row of "ends" in it and was
    # launched before; its results were taken in the step that admitted "next".
    request = decode.requests["next"]
    assert request.transfer.fence == decode.batches_launched  # type: ignore[union-attr]
    assert decode.batches_processed == decode.batches_launched
    assert pair.prefill.scheduler.requests["next"].state.value == "bootstrapping"
    pair.run()
    assert pair.decode.reasons["ends"] == "stop"
    assert pair.decode.tokens["next"] == expected_output(prompt_of(9, 2), SamplingParams(4, 1, ignore_eos=True), 50, ())
    pair.check_drained()
    pair.close()


def expected_eos() -> int:
    """The third token that `prompt_of(9, 1)` gives."""
    return expected_output(prompt_of(9, 1), params(3), 50, ())[2]
