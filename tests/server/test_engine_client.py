"""Requests, outputs and control messages between the API process and its ranks."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from scheduler.messages import AbortRequest, GenerateRequest, RankReady, SamplingParams, encode
from server.engine_client import EngineClient, SilentRanks
from server.errors import ApiError
from tests.server.fake_rank import FakeRank

pytestmark = pytest.mark.timeout(120)


def _request(text: str = "ab", count: int = 3) -> GenerateRequest:
    return GenerateRequest("", list(text.encode()), SamplingParams(max_new_tokens=count, seed=0))


def _run(num_ranks: int, test: Callable[[EngineClient, list[FakeRank]], Awaitable[None]]) -> None:
    client = EngineClient(num_ranks)
    ranks = [FakeRank(client, rank=rank) for rank in range(num_ranks)]

    async def main() -> None:
        client.start()
        await asyncio.wait_for(client.wait_ready(), 60)
        await asyncio.wait_for(test(client, ranks), 60)

    try:
        asyncio.run(main())
    finally:
        for rank in ranks:
            rank.close()
        client.close()


async def _silent_ranks(client: EngineClient, patience: float = 0.1) -> list[int]:
    """Those that do not answer, asked again with more patience while nobody does, as on a machine that stands still."""
    with pytest.raises(SilentRanks) as error:
        await client.control("ping", patience)
    if len(error.value.ranks) == client.num_ranks and patience < 10:
        return await _silent_ranks(client, 4 * patience)
    return list(error.value.ranks)


def test_a_rank_is_ready_once_it_can_be_reached() -> None:
    client = EngineClient()

    async def main() -> None:
        client.start()
        with zmq.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as inbound:
            out.connect(client.outbound_address)
            out.send(encode(RankReady(0, 4096, 64, 512, 320, [257], "float32", "cpu", 0.1)))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.wait_ready(), 0.2)
            inbound.connect(client.inbound_addresses[0])
            assert (await asyncio.wait_for(client.wait_ready(), 60)).context_length == 512
            client.submit(["r"], [_request()])
            assert inbound.poll(60_000)

    asyncio.run(main())
    client.close()


def test_ranks_that_get_their_messages_from_another_host_are_ready_when_they_say_so() -> None:
    client = EngineClient(speaks=False)

    async def main() -> None:
        client.start()
        with zmq.Context() as context, context.socket(zmq.PUSH) as out:
            out.connect(client.outbound_address)
            out.send(encode(RankReady(0, 4096, 64, 512, 320, [257], "float32", "cpu", 0.1)))
            assert (await asyncio.wait_for(client.wait_ready(), 60)).context_length == 512

    asyncio.run(main())
    client.close()


def test_sockets_are_private_and_leave_nothing() -> None:
    client = EngineClient(2)
    folder = Path(client.outbound_address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert len(set(client.inbound_addresses)) == 2
    client.close()
    client.close()
    assert not folder.exists()


def test_folders_of_killed_servers_are_removed_and_live_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = EngineClient()
    killed, fresh = tmp_path / "lockstep-api-killed", tmp_path / "lockstep-api-fresh"
    for folder in (killed, fresh):
        folder.mkdir()
        (folder / "outbound").touch()
    live_folder = Path(live.outbound_address.removeprefix("ipc://")).parent
    for folder in (killed, live_folder):
        os.utime(folder, (0, 0))
    second = EngineClient()
    try:
        assert not killed.exists()
        assert fresh.exists()
        assert live_folder.exists()
    finally:
        second.close()
        live.close()
    assert not live_folder.exists()


def test_outputs_come_in_order_and_once() -> None:
    async def test(client: EngineClient, ranks: list[FakeRank]) -> None:
        generation = client.submit(["r", "r"], [_request("ab", 5), _request("xyz", 2)])
        tokens: list[list[int]] = [[], []]
        finished = 0
        while finished < 2:
            for index, output in await generation.outputs():
                tokens[index] += output.token_ids
                finished += output.finish is not None
        assert [bytes(ids) for ids in tokens] == [b"ababa", b"xy"]
        client.release(generation)
        assert client.num_live == 0
        assert not any(isinstance(message, AbortRequest) for message in ranks[0].received)

    _run(1, test)


def test_requests_spread_over_ranks_and_controls_reach_all() -> None:
    async def test(client: EngineClient, ranks: list[FakeRank]) -> None:
        for rank in ranks:
            rank.hold.set()
        generations = [client.submit([f"r{number}"], [_request()]) for number in range(4)]
        replies = await client.control("ping", 30)
        assert [(reply.rank, reply.ok) for reply in replies] == [(0, True), (1, True)]
        assert [rank.num_samples for rank in ranks] == [2, 2]
        for generation in generations:
            client.release(generation)
        await client.control("ping", 30)
        assert [rank.num_samples for rank in ranks] == [0, 0]
        ranks[1].mute.set()
        assert await _silent_ranks(client) == [1]

    _run(2, test)


def test_names_on_the_wire_are_never_reused() -> None:
    async def test(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].hold.set()
        first = client.submit(["r"], [_request("ab")])
        with pytest.raises(ApiError) as error:
            client.submit(["r"], [_request()])
        assert (error.value.status, error.value.param) == (400, "rid")
        client.release(first)
        second = client.submit(["r"], [_request("xyz", 1)])  # while the first's end is still on its way
        ranks[0].hold.clear()
        ((index, output),) = await second.outputs()
        assert (index, output.token_ids) == (0, [120])
        client.release(second)
        names = [message.rid for message in ranks[0].received if isinstance(message, GenerateRequest)]
        assert len(set(names)) == 2

    _run(1, test)


def test_failure_wakes_everybody() -> None:
    async def test(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].hold.set()
        ranks[0].mute.set()
        generation = client.submit(["r"], [_request()])
        waiting = asyncio.create_task(generation.outputs())
        asking = asyncio.create_task(client.control("ping", 60))
        await asyncio.sleep(0)
        client.fail("gone")
        with pytest.raises(ApiError, match="gone"):
            await waiting
        with pytest.raises(ApiError, match="gone"):
            await asking
        with pytest.raises(ApiError) as error:
            client.submit(["s"], [_request()])
        assert error.value.status == 503

    _run(1, test)


def test_waiting_for_a_rank_that_fails() -> None:
    client = EngineClient()

    async def main() -> None:
        client.start()
        waiting = asyncio.create_task(client.wait_ready())
        await asyncio.sleep(0)
        client.fail("no memory")
        with pytest.raises(RuntimeError, match="no memory"):
            await waiting

    asyncio.run(main())
    client.close()


def test_samples_of_a_prompt_stay_together_and_prompts_spread() -> None:
    async def test(client: EngineClient, ranks: list[FakeRank]) -> None:
        one, other = _request("ab"), _request("ab")
        assert client.submit(list("abcd"), [one, one, one, other]).ranks == [0, 0, 0, 1]
        assert client.submit(["e"], [_request()]).ranks == [0]
        assert client.submit(["f", "g"], [_request(), _request()], dp_rank=1).ranks == [1, 1]

    _run(2, test)
