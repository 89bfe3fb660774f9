"""The choice of servers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from server.errors import ApiError
from server.router_config import POLICIES, PrefillAddress, RouterConfig
from server.router_workers import Dispatcher, Pair, Worker, WorkerError, make_policy


def make_workers(*in_flight: int) -> list[Worker]:
    workers = [Worker("prefill", PrefillAddress(f"http://p{index}"), 100) for index in range(len(in_flight))]
    for worker, count in zip(workers, in_flight, strict=True):
        worker.in_flight = count
    return workers


def make_dispatcher(num_prefill: int = 1, num_decode: int = 1, **settings: object) -> Dispatcher:
    config = RouterConfig(
        prefill=tuple(PrefillAddress(f"http://p{index}") for index in range(num_prefill)),
        decode=tuple(f"http://d{index}" for index in range(num_decode)),
        **settings,  # type: ignore[arg-type]
    )
    dispatcher = Dispatcher(config)
    for worker in dispatcher.workers:
        worker.note("answers", "")
    return dispatcher


def give_back(dispatcher: Dispatcher, pair: Pair) -> None:
    dispatcher.release(pair.prefill)
    dispatcher.release(pair.decode)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_spreads_requests_over_equal_servers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.router_workers.random", random.Random(1))
    workers = make_workers(0, 0, 0)
    policy = make_policy(name)
    chosen: Counter[Worker] = Counter()
    for number in range(300):
        worker = policy.choose(workers, b"%d" % number)
        worker.in_flight += 1
        chosen[worker] += 1
    assert set(chosen) == set(workers)
    assert max(chosen.values()) - min(chosen.values()) <= (60 if name == "random" else 3)


def test_shortest_queue_takes_the_least_loaded() -> None:
    workers = make_workers(3, 1, 2)
    assert make_policy("shortest_queue").choose(workers, b"") is workers[1]


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    workers = make_workers(0, 1, 9)
    policy = make_policy("power_of_two")
    assert workers[2] not in {policy.choose(workers, b"") for _ in range(100)}


def test_cache_aware_keeps_prompts_that_begin_alike_together() -> None:
    workers = make_workers(0, 0)
    policy = make_policy("cache_aware")
    first = policy.choose(workers, b"a" * 1024)
    first.in_flight += 1
    assert policy.choose(workers, b"a" * 1024 + b"b" * 1024) is first
    assert policy.choose(workers, b"a" * 700) is first
    other = policy.choose(workers, b"c" * 1024)
    assert other is not first
    first.in_flight += 10
    assert policy.choose(workers, b"a" * 1024) is other


def test_cache_aware_forgets_servers_that_are_not_offered() -> None:
    workers = make_workers(0, 0)
    policy = make_policy("cache_aware")
    first = policy.choose(workers, b"a" * 1024)
    rest = [worker for worker in workers if worker is not first]
    assert policy.choose(rest, b"a" * 1024) is rest[0]


def test_servers_to_avoid_are_taken_when_there_are_no_others() -> None:
    async def main() -> None:
        dispatcher = make_dispatcher(2)
        first, second = dispatcher.prefill
        assert (await dispatcher.acquire(b"", (first,))).prefill is second
        second.note("answers", "gone")
        assert (await dispatcher.acquire(b"", (first,))).prefill is first

    asyncio.run(main())


def test_places_go_to_those_who_wait_in_order() -> None:
    async def main() -> None:
        dispatcher = make_dispatcher(max_decode_requests=1)
        held = await dispatcher.acquire(b"", ())
        done: list[int] = []

        async def wait(number: int) -> None:
            pair = await dispatcher.acquire(b"", ())
            done.append(number)
            give_back(dispatcher, pair)

        tasks = [asyncio.create_task(wait(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert dispatcher.queued == 5
        tasks[2].cancel()
        give_back(dispatcher, held)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done == [0, 1, 3, 4]
        assert [worker.in_flight for worker in dispatcher.workers] == [0, 0]

    asyncio.run(main())


def test_place_given_to_one_who_has_just_left_goes_back() -> None:
    async def main() -> None:
        dispatcher = make_dispatcher(max_decode_requests=1)
        held = await dispatcher.acquire(b"", ())
        task = asyncio.create_task(dispatcher.acquire(b"", ()))
        await asyncio.sleep(0)
        give_back(dispatcher, held)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [worker.in_flight for worker in dispatcher.workers] == [0, 0]

    asyncio.run(main())


def test_no_healthy_server_says_why() -> None:
    async def main() -> None:
        dispatcher = make_dispatcher(num_decode=2)
        for worker in dispatcher.decode:
            worker.note("engine", "it is broken")
        with pytest.raises(ApiError, match="no decode server is healthy .*d0: it is broken; http://d1: it is"):
            await dispatcher.acquire(b"", ())

    asyncio.run(main())


def test_health_is_all_checks_together() -> None:
    (worker,) = make_workers(0)
    assert not worker.healthy
    assert worker.note("answers", "")
    assert worker.note("engine", "stuck")
    assert not worker.note("answers", "gone")
    assert not worker.note("engine", "")
    assert worker.problem == "gone"
    assert worker.note("answers", "") and worker.healthy and worker.problem == ""


def test_giving_up_ends_waits_and_nothing_else() -> None:
    async def main() -> None:
        (worker,) = make_workers(0)

        async def wait() -> None:
            with worker.guard():
                await asyncio.Event().wait()

        given_up, cancelled = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        cancelled.cancel()
        worker.give_up("is gone")
        results = await asyncio.gather(given_up, cancelled, return_exceptions=True)
        assert isinstance(results[0], WorkerError) and str(results[0]) == "prefill server http://p0 is gone"
        assert isinstance(results[1], asyncio.CancelledError)
        with worker.guard():
            await asyncio.sleep(0)

    asyncio.run(main())
