"""Ranks that get their messages from rank 0 make the same batches, and notice when they do not."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq

from scheduler.messages import (
    AbortRequest,
    ControlRequest,
    GenerateRequest,
    Inbound,
    RequestOutput,
    SamplingParams,
    encode,
)
from scheduler.scheduler import Scheduler
from scheduler.step_exchange import Follower, FollowerAddress, Leader, PeerLost
from scheduler.step_plan import Desync
from tests.scheduler.fake_runner import FakeEngine

FOLLOWERS = 3


@dataclass
class Ranks:
    """Rank 0 and its followers, in this thread, on fake engines of their own; `inbound` is the API process's end."""

    inbound: zmq.Socket[bytes]
    engines: list[FakeEngine]
    exchanges: list[Leader | Follower]

    def send(self, message: Inbound) -> None:
        self.inbound.send(encode(message))

    def step(self, last: list[list[RequestOutput]], wait_ms: int = 0) -> list[list[RequestOutput]]:
        """One step of every rank; their outputs."""
        outputs = []
        for engine, exchange, own in zip(self.engines, self.exchanges, last, strict=True):
            for message in exchange.begin(own, wait_ms, True).messages:
                handle(engine.scheduler, message)
            outputs.append(engine.step())
        return outputs


def handle(scheduler: Scheduler, message: Inbound) -> None:
    if isinstance(message, GenerateRequest):
        scheduler.add(message)
    elif isinstance(message, AbortRequest):
        scheduler.abort(message.rid)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as inbound:
        inbound.bind("inproc://inbound")
        engines = [
            FakeEngine(num_pages=16, context=64, max_requests=12, conservativeness=0.0) for _ in range(FOLLOWERS + 1)
        ]
        addresses = [f"inproc://step-{rank}" for rank in range(FOLLOWERS)]
        followers = [FollowerAddress(address, dp_rank=0) for address in addresses]
        leader = Leader(context, engines[0].scheduler, ["inproc://inbound"], followers)
        exchanges = [
            Follower(context, engine.scheduler, address, silence=60.0)
            for engine, address in zip(engines[1:], addresses, strict=True)
        ]
        yield Ranks(inbound, engines, [leader, *exchanges])
        context.destroy(linger=0)


def request(rid: str, prompt: list[int], new_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(rid, prompt, SamplingParams(new_tokens, 1, ignore_eos=True))


def test_a_thousand_random_steps_are_the_same_on_every_rank(ranks: Ranks) -> None:
    rng = random.Random(1)
    outputs: list[list[RequestOutput]] = [[]] * (FOLLOWERS + 1)
    ended = 0
    for step in range(1_000):
        for number in range(rng.choice([0, 0, 1, 1, 2])):
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
            ranks.send(request(f"{step}-{number}", prompt, rng.choice([1, 5, 30])))
        live = sorted(ranks.engines[0].scheduler.requests)
        if live and rng.random() < 0.1:
            ranks.send(AbortRequest(rng.choice(live)))
        outputs = ranks.step(outputs)
        assert all(other == outputs[0] for other in outputs[1:])
        ended += sum(output.finish is not None for output in outputs[0])
    assert ended > 150
    first, *others = [[batch_rows(engine, i) for i in range(len(engine.batches))] for engine in ranks.engines]
    assert all(rows == first for rows in others)
    assert ranks.engines[0].scheduler.retractions_total > 0


def batch_rows(engine: FakeEngine, index: int) -> list[tuple[str, int, int]]:
    return [(item.request.rid, item.start, item.end) for item in engine.batches[index].items]


def test_unreadable_messages_reach_nobody(ranks: Ranks) -> None:
    ranks.inbound.send(b"garbage")
    ranks.send(request("a", [1, 2, 3]))
    ranks.inbound.send(b"")
    ranks.step([[]] * (FOLLOWERS + 1), wait_ms=60_000)
    assert [list(engine.scheduler.requests) for engine in ranks.engines] == [["a"]] * (FOLLOWERS + 1)


def test_a_rank_that_sampled_another_token_stops(ranks: Ranks) -> None:
    ranks.send(request("a", [1, 2, 3]))
    last = ranks.step([[]] * (FOLLOWERS + 1), wait_ms=60_000)
    last[2] = [RequestOutput("a", [last[2][0].token_ids[0] + 1])]
    with pytest.raises(Desync, match=r"^step 2: tokens is \d+ on rank 0 and \d+ on this rank$"):
        ranks.step(last)


def test_a_rank_with_another_request_stops(ranks: Ranks) -> None:
    ranks.engines[3].scheduler.add(request("stray", [1]))
    with pytest.raises(Desync, match=r"^step 1: live_requests is 0 on rank 0 and 1 on this rank$"):
        ranks.step([[]] * (FOLLOWERS + 1))


def test_a_silent_leader_is_given_up() -> None:
    with zmq.Context() as context:
        follower = Follower(context, FakeEngine().scheduler, "inproc://nobody", silence=0.2)
        with pytest.raises(PeerLost, match=r"rank 0 has said nothing for 0.2 s"):
            follower.begin([], wait_ms=0, is_busy=False)
        context.destroy(linger=0)


@pytest.mark.parametrize("by", ["message", "descriptor"])
def test_waiting_ends_when_there_is_something_to_do(by: str) -> None:
    wake_fd = os.eventfd(0)
    with zmq.Context() as context, context.socket(zmq.PUSH) as inbound:
        inbound.bind("inproc://inbound")
        leader = Leader(context, FakeEngine().scheduler, ["inproc://inbound"], wake_fd=wake_fd)
        assert leader.begin([], wait_ms=1, is_busy=False) == ([], False)
        message = request("a", [1])
        wake = (lambda: inbound.send(encode(message))) if by == "message" else (lambda: os.eventfd_write(wake_fd, 1))
        timer = threading.Timer(0.05, wake)
        timer.start()
        started = time.monotonic()
        got = leader.begin([], wait_ms=60_000, is_busy=False)
        assert time.monotonic() - started < 30
        timer.join()
        assert got == (([message], True) if by == "message" else ([], False))
        # The descriptor was drained: nothing is left to wake anybody.
        assert leader.begin([], wait_ms=1, is_busy=False) == ([], False)
        context.destroy(linger=0)
    os.close(wake_fd)


def test_each_group_gets_its_messages_and_all_learn_of_work_and_of_the_end() -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as first, context.socket(zmq.PUSH) as second:
        first.bind("inproc://first")
        second.bind("inproc://second")
        followers = [FollowerAddress(f"inproc://step-{rank}", dp_rank=rank // 2) for rank in (1, 2, 3)]
        leader = Leader(context, FakeEngine().scheduler, ["inproc://first", "inproc://second"], followers)
        others = [Follower(context, FakeEngine().scheduler, f.address, silence=60.0) for f in followers]

        def begin() -> list[tuple[list[Inbound], bool]]:
            return [tuple(exchange.begin([], 0, False)) for exchange in (leader, *others)]

        assert begin() == [([], False)] * 4
        second.send(encode(request("a", [1])))
        wait_for_second(leader)
        assert begin() == [([], True)] * 2 + [([request("a", [1])], True)] * 2
        stop = ControlRequest(7, "shutdown")
        second.send(encode(stop))
        first.send(encode(request("b", [2])))
        wait_for_second(leader)
        assert begin() == [([request("b", [2]), stop], True)] * 2 + [([stop], True)] * 2
        context.destroy(linger=0)


def wait_for_second(leader: Leader) -> None:
    """Until what the API process sent to the second group is there."""
    assert leader._inbound[1].poll(60_000)
