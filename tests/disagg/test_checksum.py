"""Bytes that change on their way over a backend that writes into decode memory."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from disagg.base import KVPoll
from disagg.checksum import memory_checksum
from disagg.mover import KV_PAGES, Job
from disagg.pages import Slices
from tests.disagg.support import OPTIONS, Memory, ints, pair_of, wait_for

pytestmark = pytest.mark.timeout(240, method="thread")  # may hang in a library, deaf to signals


class Flip:
    """Changes a byte of decode memory once the write to it has ended, before anybody is told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.region: np.ndarray | None = None
        self.component, self.item = KV_PAGES, 0
        finish = Job.finish

        def flip_and_finish(job: Job, error: str | None = None) -> None:
            assert job.target_items is not None
            if self.region is not None and job.component == self.component and self.item in job.target_items:
                self.region[self.item, -1] ^= 4
                self.region = None
            finish(job, error)

        monkeypatch.setattr(Job, "finish", flip_and_finish)


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_a_byte_that_changed_fails_its_request_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flip = Flip(monkeypatch)
    with pair_of(backend, replace(OPTIONS, checksum=True)) as pair:
        target = pair.target
        wrong = [
            (KV_PAGES, target.kv[0], 6),
            (KV_PAGES, target.kv[3], 40),
            (0, target.window[1], 4),
            (1, target.row_state[0], 2),
        ]
        for room, place in enumerate([*wrong, None], 1):
            if place is not None:
                flip.component, flip.region, flip.item = place
            sender, receiver = pair.ends(room)
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(ints(5, 6, 2, 40), 1, [ints(3, 4), ints(2)])
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(4, 0)
            sender.send(ints(7, 8, 30))
            sender.send(ints(1), [ints(9, 1), ints(6)], last=True)
            for end in (receiver, sender):
                if place is None:
                    wait_for(end, KVPoll.Success)
                    end.clear()
                else:
                    wait_for(end, KVPoll.Failed)
                    assert "of the received bytes, sent 0x" in str(end.failure())
        for have, want in zip(target.kv, pair.source.kv, strict=True):
            np.testing.assert_array_equal(have[[5, 6, 2, 40]], want[[7, 8, 30, 1]])
        assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0


def test_checksums_of_equal_bytes_are_equal_wherever_they_lie() -> None:
    """Also where they are read in several parts."""
    source, target = Memory(fill=1, pages=40, page_bytes=1 << 19), Memory(pages=40, page_bytes=1 << 19)
    here, there = np.arange(3, 36), np.random.default_rng(2).permutation(40)[:33]
    for have, want in zip(target.kv, source.kv, strict=True):
        have[there] = want[here]
    slices = Slices.whole(source.args().kv_item_lens)
    value = memory_checksum(source.args(), KV_PAGES, here, slices)
    assert memory_checksum(target.args(), KV_PAGES, there, slices.mirrored()) == value
    target.kv[2][there[30], 77] ^= 1
    assert memory_checksum(target.args(), KV_PAGES, there, slices.mirrored()) != value


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel runs on host memory only interpreted")
def test_checksums_of_device_memory_are_those_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from disagg.tcp_device import DeviceMemory

    memory = Memory(fill=1, pages=8, page_bytes=64)
    item_lens = np.array(memory.args().kv_item_lens)
    slices = Slices(4, item_lens // 8, item_lens // 4 - 8, np.full(len(item_lens), 8))  # part of each row
    values = [memory_checksum(memory.args(), KV_PAGES, ints(5, 2, 3), way) for way in (slices, slices.mirrored())]
    assert values[0] != values[1]
    monkeypatch.setattr("disagg.checksum.frame_memory", DeviceMemory)
    assert values == [
        memory_checksum(memory.args(), KV_PAGES, ints(5, 2, 3), way) for way in (slices, slices.mirrored())
    ]
