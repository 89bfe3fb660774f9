"""Hand-over under conditions that have broken other servers; each test names what must hold instead."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from disagg.base import KVPoll
from scheduler.admission import request_keys
from scheduler.batch import Batch
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.hand_over import HandOver
from scheduler.messages import Bootstrap, Finish, GenerateRequest, SamplingParams
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import Request
from tests.scheduler.fake_pair import OPTIONS, FakePair, params, prefill_until, prompt_of, receive, until
from tests.scheduler.fake_runner import expected_output

pytestmark = pytest.mark.timeout(120)
CHUNK, PAGE = 16, 4


@pytest.fixture
def pair() -> Iterator[FakePair]:
    made = FakePair()
    yield made
    made.close()


def decode_of(pair: FakePair) -> DecodeScheduler:
    assert isinstance(pair.decode.scheduler, DecodeScheduler)
    return pair.decode.scheduler


def prefill_of(pair: FakePair) -> PrefillScheduler:
    assert isinstance(pair.prefill.scheduler, PrefillScheduler)
    return pair.prefill.scheduler


def finishes_of(pair: FakePair, seconds: float = 60.0) -> dict[str, dict[str, Finish]]:
    """Runs until idle: side -> request id -> how it ended there."""
    found: dict[str, dict[str, Finish]] = {"prefill": {}, "decode": {}}
    limit = time.monotonic() + seconds
    while True:
        idle = pair.is_idle
        for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
            found[name] |= {output.rid: output.finish for output in side.step() if output.finish is not None}
        if idle:
            return found
        time.sleep(0.0002)
        assert time.monotonic() < limit, f"not idle after {seconds} s"


class Sends:
    """What the prefill side sends, by room: one list of pages a send."""

    def __init__(self, pair: FakePair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: dict[int, list[list[int]]] = {}
        self.last: list[int] = []
        hand_over = prefill_of(pair).hand_over
        create = hand_over.create_sender

        def recorded(bootstrap: Bootstrap):  # type: ignore[no-untyped-def]
            sender = create(bootstrap)
            send, sends = sender.send, self.pages.setdefault(bootstrap.room, [])

            def noted(pages: np.ndarray, *args: object, last: bool = False, **options: object) -> None:
                sends.append(pages.tolist())
                self.last += [bootstrap.room] if last else []
                send(pages, *args, last=last, **options)  # type: ignore[arg-type]

            monkeypatch.setattr(sender, "send", noted)
            return sender

        monkeypatch.setattr(hand_over, "create_sender", recorded)


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("loops", ["plain", "overlap"])
def test_prompts_around_the_edges_of_chunks_and_pages(
    loops: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page is sent exactly once, whole ones early and the rest with the one last send."""
    lengths = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 7, 1, PAGE - 1, PAGE, PAGE + 1]
    pair = FakePair(overlap=loops == "overlap", chunk=CHUNK, page_size=PAGE)
    sends = Sends(pair, monkeypatch)
    for first in range(0, len(lengths), at_once):
        for length in lengths[first : first + at_once]:
            pair.submit(f"r{length}", prompt_of(length, length), params(5))
        pair.run()
    for room, length in enumerate(lengths, start=1):
        assert pair.decode.tokens[f"r{length}"] == expected_output(prompt_of(length, length), params(5), 50, ())
        sent = list(itertools.chain(*sends.pages[room]))
        assert len(sent) == len(set(sent)) == -(-length // PAGE)
        assert sends.last.count(room) == 1
        if at_once == 1:
            # Whole pages of each chunk; the last send has what is left, or no page.
            early = [len(pages) for pages in sends.pages[room][:-1]]
            whole = [min(end, length) // PAGE for end in range(CHUNK, length + CHUNK, CHUNK)]
            steps = [end - start for start, end in zip([0, *whole], whole, strict=False)]
            assert early == [step for step in steps if step][: len(early)]
    pair.check_drained()
    pair.close()


@pytest.mark.parametrize("prefill_keeps", [False, True])
def test_a_prefix_on_the_decode_side_shortens_the_transfer(
    prefill_keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two caches with hits of different length; also a prompt of whole pages that is cached as a whole."""
    pair = FakePair(prefill={"prefix_cache": prefill_keeps}, num_pages=128)
    sends = Sends(pair, monkeypatch)
    prompt = prompt_of(64)
    prompts = [prompt, prompt, prompt[:32] + prompt_of(31, 1), prompt, prompt[:33], prompt_of(64, 2)]
    for i, each in enumerate(prompts):
        pair.submit(f"r{i}", each, params(3))
        pair.run()
        assert pair.decode.tokens[f"r{i}"] == expected_output(each, params(3), 50, ())
        if prefill_keeps and i == 0:
            assert prefill_of(pair).flush_cache()  # the decode side now has more than the prefill side
    counts = [sum(map(len, sends.pages[room])) for room in range(1, 1 + len(prompts))]
    # The page of the token that is computed in any case is sent, as are those that the decode side has not got.
    assert counts == [16, 1, 8, 1, 1, 16]
    pair.check_drained()
    pair.close()


def test_aborts_by_the_decode_side_empty_the_prefill_queue() -> None:
    """50 prompts of three chunks for one place; all but the last are given up while queued or between chunks.

    All are queued before the first is computed, and all are known to be given up before the next step.
    """
    pair = FakePair(prefill={"max_requests": 1}, decode={"num_pages": 1024, "max_requests": 64}, chunk=CHUNK)
    prefill = prefill_of(pair)
    prompts = {f"r{i}": prompt_of(3 * CHUNK, i) for i in range(50)}
    for rid, prompt in prompts.items():
        pair.submit(rid, prompt, params(4))
    *victims, last = prefill.requests.values()
    decode_until(pair, [*victims, last], KVPoll.WaitingForInput)
    until(pair, "r0", "prefilling")
    (first,) = prefill.prefilling
    queued = [request for request in prefill.waiting if request is not last]
    assert victims == [first, *queued]
    for request in victims:
        pair.decode.scheduler.abort(request.rid)
    decode_until(pair, victims, KVPoll.Failed)
    pair.run()
    for side in pair.sides:
        assert [side.reasons[request.rid] for request in victims] == ["abort"] * 49
    assert pair.decode.tokens[last.rid] == expected_output(prompts[last.rid], params(4), 50, ())
    for request in queued:
        assert prefill.memory.cache.match_length(request_keys(request, prefill.memory)) == 0
    pair.check_drained()
    pair.close()


def decode_until(pair: FakePair, requests: list[Request], state: KVPoll) -> None:
    """Steps of the decode side alone until all these requests of the prefill side are so far."""
    limit = time.monotonic() + 60
    while not all(end_of(request).poll() is state for request in requests):
        pair.decode.step()
        time.sleep(0.0002)
        assert time.monotonic() < limit, f"not all are {state.name}"


@pytest.mark.parametrize("sides", ["prefill", "decode", "both"])
def test_requests_aborted_as_soon_as_they_have_come(sides: str) -> None:
    """Many with one place on either side; the next request is served as if nothing had been."""
    pair = FakePair(max_requests=1)
    aborted = [getattr(pair, sides)] if sides != "both" else list(pair.sides)
    for i in range(100):
        pair.submit(f"r{i}", prompt_of(20, i), params(4))
        if i % 3 == 0:
            pair.step()
        for side in aborted:
            side.scheduler.abort(f"r{i}")
            side.scheduler.abort(f"r{i}")  # twice, and of one that is unknown by now
    found = finishes_of(pair)
    assert set(found["decode"]) | set(pair.decode.reasons) == {f"r{i}" for i in range(100)}
    pair.submit("probe", prompt_of(20), params(4))
    pair.run()
    assert pair.decode.tokens["probe"] == expected_output(prompt_of(20), params(4), 50, ())
    pair.check_drained()
    pair.close()


def test_aborting_retracted_requests_leaves_nothing() -> None:
    pair = FakePair(decode={"num_pages": 12, "context": 48}, reserved_tokens=0)
    decode = decode_of(pair)
    for cycle in range(20):
        rids = [f"r{cycle}-{i}" for i in range(5)]
        for i, rid in enumerate(rids):
            pair.submit(rid, prompt_of(12, i), params(24))
        receive(pair)
        limit = time.monotonic() + 60
        while not decode.waiting:
            pair.step_or_rest()
            assert time.monotonic() < limit, "no request was retracted"
        victims = [request.rid for request in decode.waiting]
        for rid in victims:
            decode.abort(rid)
        pair.run()
        for i, rid in enumerate(rids):
            want = expected_output(prompt_of(12, i), params(24), 50, ())
            got = pair.decode.tokens[rid]
            assert got == want[: len(got)]
            assert rid in victims or got == want, pair.decode.messages[rid]
        pair.check_drained()
    pair.close()


def test_both_sides_abort_in_the_same_moment() -> None:
    """Nobody waits for the other's word, and the pages come back, however little memory there is."""
    pair = FakePair(decode={"num_pages": 8, "context": 32})
    rng = random.Random(1)
    for i in range(100):
        pair.submit(f"r{i}", prompt_of(20, i), params(4))
        for _ in range(rng.randrange(12)):
            pair.step()
        for side in rng.sample(pair.sides, 2):
            side.scheduler.abort(f"r{i}")
    pair.run()
    for i in range(5):
        pair.submit(f"probe{i}", prompt_of(20, i), params(4))
    pair.run()
    for i in range(5):
        assert pair.decode.tokens[f"probe{i}"] == expected_output(prompt_of(20, i), params(4), 50, ())
    pair.check_drained()
    pair.close()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_that_ends_before_it_asked_for_its_room_is_not_waited_for(pair: FakePair, first: str) -> None:
    """The first request to a prefill server: the decode side has no connection yet when its client leaves."""
    bootstrap = Bootstrap("127.0.0.1", pair.bootstrap.port, 7)
    request = GenerateRequest("r", prompt_of(20), params(), bootstrap=bootstrap)
    if first == "prefill":
        pair.prefill.scheduler.add(request)
    pair.decode.scheduler.add(request)
    pair.decode.scheduler.abort("r")
    if first == "decode":
        wait_until_told(pair, 7)
        pair.prefill.scheduler.add(request)
    found = finishes_of(pair, OPTIONS.bootstrap_timeout / 2)
    assert found["prefill"]["r"].message == "the decode side gave up: aborted"
    pair.check_drained()


def wait_until_told(pair: FakePair, room: int) -> None:
    limit = time.monotonic() + 60
    while room not in prefill_of(pair).hand_over.manager._end._declined:  # type: ignore[attr-defined]
        time.sleep(0.001)
        assert time.monotonic() < limit, f"the prefill side was not told of room {room}"


@pytest.mark.parametrize("why", ["too long", "queue full"])
def test_what_the_decode_side_refuses_ends_on_the_prefill_side_too(why: str) -> None:
    pair = FakePair(decode={"context": 40, "queued": 0 if why == "queue full" else None})
    pair.submit("r", prompt_of(60 if why == "too long" else 20), params())
    found = finishes_of(pair, OPTIONS.bootstrap_timeout / 2)
    text = "the limit of 40 tokens" if why == "too long" else "--max-queued-requests"
    assert text in found["prefill"]["r"].message
    assert found["prefill"]["r"].status == 500
    pair.check_drained()
    pair.close()


def test_what_the_prefill_side_refused_is_told_to_a_decode_side_that_comes_later() -> None:
    pair = FakePair(prefill={"context": 40})
    bootstrap = Bootstrap("127.0.0.1", pair.bootstrap.port, 7)
    request = GenerateRequest("r", prompt_of(60), params(), bootstrap=bootstrap)
    pair.prefill.scheduler.add(request)
    pair.prefill.step()
    pair.decode.scheduler.add(request)
    finish = finishes_of(pair)["decode"]["r"]
    assert finish.status == 500
    assert "room 7 has already ended on the prefill side: 60 prompt tokens" in finish.message
    pair.check_drained()
    pair.close()


def test_a_prefill_side_busy_with_others_times_nobody_out() -> None:
    """The queue of the prefill side takes longer than waiting_timeout: only its silence would count."""
    pair = FakePair(prefill={"max_requests": 1}, options=replace(OPTIONS, waiting_timeout=1))
    pair.submit("first", prompt_of(40, 1), params(4))
    pair.submit("second", prompt_of(40, 2), params(4))
    until(pair, "first", "prefilling")
    until(pair, "second", "receiving")
    limit = time.monotonic() + 1.5
    while time.monotonic() < limit:
        pair.decode.step()  # the prefill side computes nothing meanwhile
        assert set(pair.decode.scheduler.requests) == {"first", "second"}
        time.sleep(0.01)
    pair.run()
    for rid, seed in (("first", 1), ("second", 2)):
        assert pair.decode.tokens[rid] == expected_output(prompt_of(40, seed), params(4), 50, ())
    pair.check_drained()
    pair.close()


def test_a_request_that_never_comes_to_the_prefill_side_fails_in_its_bound() -> None:
    pair = FakePair(options=replace(OPTIONS, waiting_timeout=1))
    bootstrap = Bootstrap("127.0.0.1", pair.bootstrap.port, 7)
    pair.decode.scheduler.add(GenerateRequest("r", prompt_of(20), params(), bootstrap=bootstrap))
    pair.submit("other", prompt_of(20, 1), params())
    found = finishes_of(pair, 30)
    finish = found["decode"]["r"]
    assert finish.status == 500
    assert "did not arrive at the prefill server within waiting_timeout (1 s)" in finish.message
    assert pair.decode.tokens["other"] == expected_output(prompt_of(20, 1), params(), 50, ())
    pair.check_drained()
    pair.close()


class OtherRank:
    """Stands for a second rank of the group: `state` is what it has for every room."""

    def __init__(self, hand_over: HandOver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = KVPoll.Success
        monkeypatch.setattr(hand_over, "_min_reduce", lambda values: [min(value, int(self.state)) for value in values])


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_no_rank_acts_on_what_it_alone_knows(pair: FakePair, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success here and Transferring elsewhere is Transferring; Success here and Failed elsewhere is Failed at once."""
    scheduler = getattr(pair, side).scheduler
    other = OtherRank(scheduler.hand_over, monkeypatch)
    for rid, outcome in (("goes on", KVPoll.Success), ("fails", KVPoll.Failed)):
        other.state = KVPoll.Transferring
        pair.submit(rid, prompt_of(20), params())
        limit = time.monotonic() + 60
        while rid not in scheduler.requests or end_of(scheduler.requests[rid]).poll() is not KVPoll.Success:
            pair.step_or_rest()
            assert time.monotonic() < limit, "no success on this rank"
        for _ in range(5):
            pair.step()
        assert scheduler.requests[rid].state.value in ("sending", "receiving")
        other.state = outcome
        outputs = getattr(pair, side).step()
        if outcome is KVPoll.Failed:
            (finish,) = [output.finish for output in outputs if output.rid == rid]
            assert finish is not None and (finish.reason, finish.status) == ("abort", 500)
            assert finish.message == "another rank of this server has failed"
        other.state = KVPoll.Success
        pair.run()
    assert pair.decode.tokens["goes on"] == expected_output(prompt_of(20), params(), 50, ())
    pair.check_drained()


def end_of(request: Request):  # type: ignore[no-untyped-def]
    transfer = request.transfer
    return getattr(transfer, "sender", None) or getattr(transfer, "receiver")  # noqa: B009


def test_a_failed_fetch_is_an_error_and_never_other_text(pair: FakePair) -> None:
    """And the next request of the same prompt is right: nothing half-received is kept as a prefix."""
    decode = decode_of(pair)
    pair.submit("bad", prompt_of(60), params())
    until(pair, "bad", "receiving")
    end_of(decode.requests["bad"]).abort("the link is down")
    found = finishes_of(pair)
    assert (found["decode"]["bad"].status, found["decode"]["bad"].message) == (500, "the link is down")
    assert pair.decode.tokens["bad"] == []
    assert (decode.hand_over.failed_total, prefill_of(pair).hand_over.failed_total) == (1, 1)
    pair.submit("good", prompt_of(60), params())
    pair.run()
    assert pair.decode.tokens["good"] == expected_output(prompt_of(60), params(), 50, ())
    assert decode.hand_over.completed_total == 1
    pair.check_drained()


def test_one_token_and_no_token_need_no_forward_on_the_decode_side(pair: FakePair) -> None:
    prompt = prompt_of(33)
    first = expected_output(prompt, params(1), 50, ())
    pair.submit("one", prompt, SamplingParams(1, 1, ignore_eos=True))
    pair.submit("stop", prompt, SamplingParams(9, 1, stop_token_ids=(first[0],)))
    pair.submit("none", prompt, SamplingParams(0, 1))
    pair.run()
    assert pair.decode.tokens == {"one": first, "stop": first, "none": []}
    assert pair.decode.reasons == {"one": "length", "stop": "stop", "none": "length"}
    assert pair.prefill.reasons == {"one": "length", "stop": "length", "none": "length"}
    assert decode_of(pair).batches_launched == 0
    pair.check_drained()


@pytest.mark.parametrize("overlap", [False, True])
def test_cached_pages_leave_before_the_rest_is_computed(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = FakePair(overlap=overlap, chunk=CHUNK, page_size=PAGE, decode={"prefix_cache": False})
    sends = Sends(pair, monkeypatch)
    pair.submit("first", prompt_of(42), params(2))
    pair.run()
    pair.submit("second", prompt_of(42)[:30] + prompt_of(40, 1), params(2))
    computed: list[int] = []
    launch = pair.prefill.runner.launch

    def noted(batch: Batch):  # type: ignore[no-untyped-def]
        computed.append(sum(len(pages) for pages in sends.pages[2]))
        return launch(batch)

    monkeypatch.setattr(pair.prefill.runner, "launch", noted)
    pair.run()
    # 28 of the 30 tokens that both have fill pages; they are gone before the first chunk starts, and each chunk of 16
    # tokens lets four more go.
    assert computed[0] == 7
    assert [len(pages) for pages in sends.pages[2]] == [7, 4, 4, 3]
    pair.check_drained()
    pair.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_step_that_takes_a_request_over_decodes_it(overlap: bool) -> None:
    pair = FakePair(overlap=overlap)
    prompt = prompt_of(20)
    pair.submit("r", prompt, params(4))
    until(pair, "r", "receiving")
    decode = decode_of(pair)
    prefill_until(pair, [decode.requests["r"]], KVPoll.Success)
    outputs = pair.decode.step()
    assert outputs[0].token_ids == expected_output(prompt, params(4), 50, ())[:1]
    (batch,) = pair.decode.batches
    assert [(item.request.rid, item.start, item.end) for item in batch.items] == [("r", 20, 21)]
    pair.run()
    assert pair.decode.tokens["r"] == expected_output(prompt, params(4), 50, ())
    pair.check_drained()
    pair.close()
