"""Prefill and decode with different TP sizes: the plan, and whole transfers between groups of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from disagg.base import KVArgs, KVManager, KVPoll, StateComponent, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.control import Done
from disagg.description import KVDescription, component_slices, refusal
from disagg.pages import paired_address_list
from disagg.registry import KV_MANAGERS
from disagg.tp_plan import heads_of, leg_between, legs_of, num_claimants
from tests.disagg.support import OPTIONS, ints, wait_for, wait_until

pytestmark = pytest.mark.timeout(240)
REAL = [name for name in KV_MANAGERS if name != "fake"]
PAGE, HEAD_BYTES = 4, 6


class Rank:
    """A rank's share of [pages, page_size, heads, head bytes] in two regions, with state of both kinds."""

    def __init__(self, tp_rank: int, tp_size: int, heads: int, fill: bool, pages: int = 8) -> None:
        mine = heads_of(tp_rank, tp_size, heads)

        def share(seed: int, items: int, rows: int, width: int) -> np.ndarray:
            whole = np.random.default_rng(seed).integers(1, 256, (items, rows, heads, width), dtype=np.uint8)
            part = np.ascontiguousarray(whole[:, :, mine.start : mine.stop])
            return part if fill else np.zeros_like(part)

        self.kv = [share(1, pages, PAGE, HEAD_BYTES), share(2, pages, PAGE, 2 * HEAD_BYTES)]
        self.window = share(3, pages, PAGE, HEAD_BYTES)
        same = np.random.default_rng(4).integers(1, 256, (pages, 10), dtype=np.uint8)
        self.row = same if fill else np.zeros_like(same)
        self.aux = np.full((4, 32), 7 if fill else 0, dtype=np.uint8)
        self._place = {"tp_rank": tp_rank, "tp_size": tp_size, "kv_head_num": len(mine), "total_kv_head_num": heads}

    def args(self, **changes: object) -> KVArgs:
        def described(*arrays: np.ndarray) -> tuple[list[int], list[int], list[int]]:
            return [a.ctypes.data for a in arrays], [a.nbytes for a in arrays], [a[0].nbytes for a in arrays]

        args = KVArgs(
            "tiny",
            PAGE,
            "uint8",
            "token-head",
            self._place["kv_head_num"],
            self._place["total_kv_head_num"],
            *described(*self.kv),
            [0, 1],
            *described(self.aux),
            state=[
                StateComponent("swa", *described(self.window), head_rows=PAGE),
                StateComponent("request_row", *described(self.row)),
            ],
            tp_rank=self._place["tp_rank"],
            tp_size=self._place["tp_size"],
        )
        return replace(args, **changes)  # type: ignore[arg-type]

    def description(self) -> KVDescription:
        return KVDescription.of(self.args())


@contextmanager
def groups(
    backend: str, prefill_size: int, decode_size: int, heads: int, options: TransferOptions = OPTIONS
) -> Iterator[tuple[list, list, str]]:
    """Lists of (rank, manager) for both sides, and the bootstrap address."""
    server = BootstrapServer("127.0.0.1", 0)
    sides: list[list[tuple[Rank, KVManager]]] = []
    try:
        for role, size in (("prefill", prefill_size), ("decode", decode_size)):
            side: list[tuple[Rank, KVManager]] = []
            sides.append(side)
            for tp_rank in range(size):
                rank = Rank(tp_rank, size, heads, fill=role == "prefill")
                addr = server.address if role == "prefill" else None
                side.append((rank, KV_MANAGERS[backend](rank.args(), role, options, addr, f"{role} start")))
        yield sides[0], sides[1], server.address
    finally:
        for side in reversed(sides):
            for _, manager in side:
                manager.close()
        server.close()


@pytest.mark.parametrize("prefill_size", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_size", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_head_comes_once_from_a_rank_that_holds_it(prefill_size: int, decode_size: int, heads: int) -> None:
    asked = [0] * prefill_size
    for decode_rank in range(decode_size):
        legs = legs_of(decode_rank, decode_size, prefill_size, heads)
        assert [leg.first for leg in legs] == [True] + [False] * (len(legs) - 1)
        got = []
        for leg in legs:
            asked[leg.prefill_rank] += 1
            sent = range(leg.first_head, leg.first_head + leg.num_heads)
            assert set(sent) <= set(heads_of(leg.prefill_rank, prefill_size, heads))
            got += sent
            assert leg_between(leg.prefill_rank, prefill_size, decode_rank, decode_size, heads) == leg
        assert got == list(heads_of(decode_rank, decode_size, heads))
    assert asked == [num_claimants(prefill_size, decode_size)] * prefill_size


def test_ranks_of_the_mapping_table() -> None:
    """equal, more decode ranks, more prefill ranks with split heads and with one shared head."""
    assert [leg.prefill_rank for leg in legs_of(3, 4, 4, 8)] == [3]
    assert [leg.prefill_rank for leg in legs_of(3, 4, 2, 8)] == [1]
    assert [(leg.prefill_rank, leg.num_heads) for leg in legs_of(1, 2, 4, 8)] == [(2, 2), (3, 2)]
    assert [(leg.prefill_rank, leg.num_heads) for leg in legs_of(1, 2, 4, 1)] == [(2, 1), (3, 0)]
    with pytest.raises(ValueError, match="decode rank 0 of 2 has no business with prefill rank 3 of 4"):
        leg_between(3, 4, 0, 2, 8)


def test_slices_address_the_heads_inside_each_token_row() -> None:
    source, target = Rank(0, 1, 4, True), Rank(1, 2, 4, False)
    slices = component_slices(source.description(), target.description())[0]
    args, target_args = source.args(), target.args()
    addresses = paired_address_list(
        args.kv_data_ptrs,
        args.kv_item_lens,
        ints(3),
        target_args.kv_data_ptrs,
        target_args.kv_item_lens,
        ints(5),
        slices,
    )
    sources, targets, lengths = (values.astype(np.int64) for values in addresses)
    token, half = 4 * HEAD_BYTES, 2 * HEAD_BYTES
    assert (sources[:PAGE] - args.kv_data_ptrs[0]).tolist() == [(3 * PAGE + t) * token + half for t in range(PAGE)]
    assert (targets[:PAGE] - target_args.kv_data_ptrs[0]).tolist() == [(5 * PAGE + t) * half for t in range(PAGE)]
    assert lengths.tolist() == [half] * PAGE + [2 * half] * PAGE


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp_size": 3}, "tp_size of one side must be a multiple of the other"),
        ({"kv_head_num": 3}, "kv_head_num: theirs has 3 with tp_size 2, 4 heads in all make 2"),
        ({"total_kv_head_num": 8}, "total_kv_head_num differs: mine has 4, theirs has 8"),
        ({"kv_item_lens": [96, 96]}, "kv items differ: mine has 96 bytes for 4 heads, theirs has 96 for 2"),
        ({"kv_item_lens": [48, 90]}, "kv items differ"),
        ({"state_item_lens": [[48], [11]]}, r"state_item_lens differs: mine has \[10\], theirs has \[11\]"),
        ({"state_item_lens": [[52], [10]]}, "state swa items differ"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_both_values(changes: dict[str, object], text: str) -> None:
    mine, theirs = Rank(0, 1, 4, True).description(), Rank(0, 2, 4, True).description()
    if "tp_size" in changes:
        mine = Rank(0, 2, 4, True).description()
    assert refusal(mine, Rank(1, 2, 4, True).description(), "mine", "theirs") is None
    reason = refusal(mine, msgspec.structs.replace(theirs, **changes), "mine", "theirs")
    assert reason is not None and re.search(text, reason), reason


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "heads"), [(1, 2, 4), (2, 1, 4), (2, 2, 4), (4, 2, 1), (2, 4, 2), (4, 1, 2)]
)
def test_groups_of_unequal_size(backend: str, prefill_size: int, decode_size: int, heads: int) -> None:
    """Split heads, one head for all (MLA), and fewer heads than ranks; in chunks, with state, twice."""
    rng = np.random.default_rng(3)
    options = replace(OPTIONS, checksum=True)
    with groups(backend, prefill_size, decode_size, heads, options) as (prefill, decode, address):
        for room in (1, 2):
            source, target = rng.permutation(8)[:5], rng.permutation(8)[:5]
            receivers = [manager.create_receiver(room, address) for _, manager in decode]
            senders = [manager.create_sender(room) for _, manager in prefill]
            for receiver in receivers:
                receiver.init()
            for receiver in receivers:
                wait_for(receiver, KVPoll.WaitingForInput)
                assert all(sender.poll() is KVPoll.Bootstrapping for sender in senders) or receiver is not receivers[0]
                receiver.send_metadata(target, 2, [target[:2], ints(6)], skip_pages=room)
            for sender in senders:
                wait_for(sender, KVPoll.WaitingForInput)
                assert sender.skip_pages() == room
                sender.init(5, 1)
                sender.send(source[:3])
            for sender in senders:
                sender.send(source[3:], [source[:2], ints(4)], last=True, note=b"n")
            for end in (*receivers, *senders):
                wait_for(end, KVPoll.Success)
                end.clear()
            for rank, _ in decode:
                whole = Rank(rank.args().tp_rank, decode_size, heads, fill=True)
                for have, want in zip(rank.kv, whole.kv, strict=True):
                    np.testing.assert_array_equal(have[target], want[source])
                    assert not np.delete(have, target, axis=0).any()
                    have[:] = 0
                np.testing.assert_array_equal(rank.window[target[:2]], whole.window[source[:2]])
                np.testing.assert_array_equal(rank.row[6], whole.row[4])
                np.testing.assert_array_equal(rank.aux[2], whole.aux[1])
        assert all(manager.num_rooms() == 0 for _, manager in (*prefill, *decode))


@pytest.mark.parametrize("backend", REAL)
def test_a_sender_waits_for_the_indices_of_all_its_decode_ranks(backend: str) -> None:
    with groups(backend, 1, 2, 4) as (prefill, decode, address):
        sender = prefill[0][1].create_sender(1)
        receivers = [manager.create_receiver(1, address) for _, manager in decode]
        for receiver in receivers:
            receiver.init()
            wait_for(receiver, KVPoll.WaitingForInput)
        receivers[0].send_metadata(ints(1), 0)
        with pytest.raises(RuntimeError, match="before the room is WaitingForInput"):
            sender.send(ints(1), last=True)
        assert sender.poll() is KVPoll.Bootstrapping
        receivers[1].send_metadata(ints(1, 2), 0)
        wait_for(sender, KVPoll.Failed)
        # Their messages come over two connections, in either order.
        said = str(sender.failure())
        assert "decode ranks disagree" in said and "1 pages after 0" in said and "2 pages after 0" in said
        for receiver in receivers:
            wait_for(receiver, KVPoll.Failed)
            receiver.clear()


@pytest.mark.parametrize("backend", REAL)
def test_a_receiver_waits_for_every_prefill_rank_and_counts_each_once(backend: str) -> None:
    """Statement 4 of the hand-over rules: the same rank four times is not four ranks."""
    with groups(backend, 4, 1, 4) as (prefill, decode, address):
        receiver = decode[0][1].create_receiver(1, address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(3), 0)
        senders = [manager.create_sender(1) for _, manager in prefill]
        for sender in senders:
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(1, 0)
        end = decode[0][1]._end  # type: ignore[attr-defined]
        group = next(iter(end._groups.values()))
        incoming = next(iter(end._incoming.values()))
        for sender in senders[:3]:
            sender.send(ints(1), last=True)
        for _ in range(4):
            end._on_message(group, group.ranks[0], Done(incoming.transfer_id, bytes(32), b""))
            assert receiver.poll() < KVPoll.Success
        assert not decode[0][0].aux[0].any()
        senders[3].send(ints(1), last=True)
        wait_for(receiver, KVPoll.Success)
        for end in (receiver, *senders):
            wait_for(end, KVPoll.Success)
            end.clear()


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1)])
def test_one_rank_giving_up_fails_the_room_on_all(backend: str, prefill_size: int, decode_size: int) -> None:
    with groups(backend, prefill_size, decode_size, 4) as (prefill, decode, address):
        for room, side in ((1, "prefill"), (2, "decode")):
            receivers = [manager.create_receiver(room, address) for _, manager in decode]
            senders = [manager.create_sender(room) for _, manager in prefill]
            for receiver in receivers:
                receiver.init()
                wait_for(receiver, KVPoll.WaitingForInput)
                receiver.send_metadata(ints(3), 0)
            (senders if side == "prefill" else receivers)[-1].abort("had enough")
            for receiver in receivers:
                wait_for(receiver, KVPoll.Failed)
                assert "had enough" in str(receiver.failure())
            for sender in senders:
                wait_for(sender, KVPoll.Failed)
                assert "had enough" in str(sender.failure())
        assert all(manager.num_rooms() == 0 for _, manager in (*prefill, *decode))


@pytest.mark.parametrize("backend", REAL)
def test_another_decode_server_cannot_join_a_room(backend: str) -> None:
    with groups(backend, 1, 2, 4) as (prefill, decode, address):
        other = KV_MANAGERS[backend](Rank(1, 2, 4, False).args(), "decode", OPTIONS, None, "another start")
        try:
            mine, theirs = decode[0][1].create_receiver(1, address), other.create_receiver(1, address)
            mine.init()
            wait_for(mine, KVPoll.WaitingForInput)
            mine.send_metadata(ints(1), 0)
            wait_until(lambda: prefill[0][1].num_rooms() == 1)
            theirs.init()
            wait_for(theirs, KVPoll.Failed)
            assert "room 1 is in use by another request" in str(theirs.failure())
            assert mine.poll() is KVPoll.WaitingForInput
        finally:
            other.close()
    with pytest.raises(ValueError, match="common incarnation"):
        KV_MANAGERS[backend](Rank(1, 2, 4, False).args(), "decode", OPTIONS)
