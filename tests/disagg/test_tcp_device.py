"""Device memory over the tcp backend: through host memory, and from one process's device to another's."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.tcp import TcpKVManager
from tests.disagg.device_memory import DevicePages
from tests.disagg.support import (
    OPTIONS,
    Pair,
    hear,
    ints,
    pair_of,
    python_process,
    tell,
    wait_for,
    wait_for_end,
    wait_until,
)

pytestmark = pytest.mark.timeout(360)


def check_transfer(pair: Pair, room: int) -> None:
    rng = np.random.default_rng(room)
    source, target = rng.permutation(16)[:5], rng.permutation(16)[:5]
    sender, receiver = pair.ends(room)
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(target, 2, [ints(3, 9), ints(1)])
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(5, 4)
    sender.send(source[:2])
    sender.send(source[2:], [ints(8, 2), ints(6)], last=True)
    wait_for(receiver, KVPoll.Success)
    wait_for(sender, KVPoll.Success)
    for have, want in zip(pair.target.kv, pair.source.kv, strict=True):
        np.testing.assert_array_equal(have[target], want[source])
        assert not np.delete(have, target, axis=0).any()
        have[:] = 0
    np.testing.assert_array_equal(pair.target.window[1][[3, 9]], pair.source.window[1][[8, 2]])
    np.testing.assert_array_equal(pair.target.row_state[0][1], pair.source.row_state[0][6])
    sender.clear()
    receiver.clear()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel runs on host memory only interpreted")
@pytest.mark.parametrize("same_host", [True, False])
def test_frames_through_staging_memory(monkeypatch: pytest.MonkeyPatch, same_host: bool) -> None:
    """Host memory treated like a device's."""
    from disagg import tcp_device
    from disagg.tcp_device import DeviceMemory

    one_at_a_time = threading.Lock()
    copy_items = tcp_device.copy_items

    def copy(*args: object) -> None:
        """The interpreter keeps the running program in a global variable."""
        with one_at_a_time:
            copy_items(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tcp_device, "copy_items", copy)
    for module in ("tcp_prefill", "tcp_decode"):
        monkeypatch.setattr(f"disagg.{module}.frame_memory", DeviceMemory)
    with pair_of("tcp", replace(OPTIONS, same_host_path=same_host, checksum=True), pages=16, page_bytes=128) as pair:
        check_transfer(pair, 1)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel runs on host memory only interpreted")
@pytest.mark.parametrize("unit", [16, 4, 1])
def test_items_are_copied_by_address_with_the_widest_access_that_fits(unit: int) -> None:
    from layers.kernels.triton_copy_items import ItemSide, copy_items

    rng = np.random.default_rng(unit)
    rows = 4
    item_lens = np.array([unit * 8 * rows, unit * 12 * rows])
    sources = [rng.integers(1, 256, (9, rows, length // rows), dtype=np.uint8) for length in item_lens]
    targets = [np.zeros((7, rows, length // rows), dtype=np.uint8) for length in item_lens]
    half = item_lens // rows // 2
    copy_items(
        ItemSide(np.array([region.ctypes.data for region in sources]) + half, item_lens, ints(3, 8, 1)),
        ItemSide(np.array([region.ctypes.data for region in targets]), item_lens, ints(6, 0, 2)),
        rows,
        half,
        torch.device("cpu"),
    )
    for source, target, width in zip(sources, targets, half, strict=True):
        np.testing.assert_array_equal(target[[6, 0, 2], :, :width], source[[3, 8, 1], :, width:])
        assert not target[:, :, width:].any() and not target[[1, 3, 4, 5]].any()


def last_device() -> str:
    return f"cuda:{torch.cuda.device_count() - 1}"


@contextmanager
def device_prefill(device: str, same_host: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with python_process("-m", "tests.disagg.device_prefill_process", device, str(int(same_host))) as process:
        yield process, hear(process)


def fetch(manager: TcpKVManager, pages: DevicePages, process: subprocess.Popen[str], address: str, room: int) -> None:
    """All pages of the other process, in another order."""
    receiver = manager.create_receiver(room, address)
    receiver.init()
    wait_for(receiver, KVPoll.WaitingForInput)
    order = np.random.default_rng(room).permutation(pages.num_pages)
    receiver.send_metadata(order, 0)
    tell(process, room)
    wait_for(receiver, KVPoll.Success)
    want = DevicePages("cpu", fill=True)
    for have, region in zip(pages.regions, want.regions, strict=True):
        assert torch.equal(have[torch.from_numpy(order)].cpu(), region)
        have.zero_()
    receiver.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("devices", [("first", "first"), ("first", "last"), ("first", "cpu"), ("cpu", "first")])
def test_pages_of_another_process_s_device_arrive(devices: tuple[str, str], same_host: bool) -> None:
    """Device to device on one host (where there is one device, from it to itself), and through host memory."""
    names = {"first": "cuda:0", "last": last_device(), "cpu": "cpu"}
    pages = DevicePages(names[devices[1]])
    manager = TcpKVManager(pages.args(), "decode", replace(OPTIONS, same_host_path=same_host))
    try:
        with device_prefill(names[devices[0]], same_host) as (process, address):
            for room in (1, 2):
                fetch(manager, pages, process, address, room)
                assert manager.num_rooms() == 0
    finally:
        manager.close()


@pytest.mark.gpu
def test_device_pages_are_read_without_the_host_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from disagg.tcp_device import RemoteDevice

    fetched: list[int] = []
    fetch_frame = RemoteDevice.fetch

    def counted(self: RemoteDevice, header, items, part) -> None:  # type: ignore[no-untyped-def]
        fetched.append(header.num_bytes)
        fetch_frame(self, header, items, part)

    monkeypatch.setattr(RemoteDevice, "fetch", counted)
    pages = DevicePages(last_device())
    manager = TcpKVManager(pages.args(), "decode", OPTIONS)
    try:
        with device_prefill("cuda:0", True) as (process, address):
            fetch(manager, pages, process, address, 1)
        assert sum(fetched) == sum(region.numel() for region in pages.regions)
    finally:
        manager.close()


@pytest.mark.gpu
def test_prefill_killed_while_its_device_is_read_leaves_the_decode_device_usable() -> None:
    pages = DevicePages(last_device())
    manager = TcpKVManager(pages.args(), "decode", OPTIONS)
    try:
        for turn in range(5):
            with device_prefill("cuda:0", True) as (process, address):
                fetch(manager, pages, process, address, 10 * turn + 1)
                receiver = manager.create_receiver(10 * turn + 2, address)
                receiver.init()
                wait_for(receiver, KVPoll.WaitingForInput)
                receiver.send_metadata(np.arange(pages.num_pages), 0)
                assert process.stdin is not None
                process.stdin.write(f"{10 * turn + 2}\n")
                process.stdin.flush()
                wait_until(lambda: receiver.poll() is not KVPoll.WaitingForInput)  # noqa: B023
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                wait_for_end(receiver)
                receiver.clear()
            for region in pages.regions:
                region.zero_()
                assert not region.any()
        assert manager.num_rooms() == 0
    finally:
        manager.close()


@pytest.mark.gpu
def test_abort_while_a_device_is_read_frees_the_pages_at_once() -> None:
    pages = DevicePages(last_device())
    manager = TcpKVManager(pages.args(), "decode", OPTIONS)
    try:
        with device_prefill("cuda:0", True) as (process, address):
            fetch(manager, pages, process, address, 1)
            for room in range(2, 12):
                receiver = manager.create_receiver(room, address)
                receiver.init()
                wait_for(receiver, KVPoll.WaitingForInput)
                receiver.send_metadata(np.arange(pages.num_pages), 0)
                assert process.stdin is not None
                process.stdin.write(f"{room}\n")
                process.stdin.flush()
                if room % 2:
                    wait_until(lambda: receiver.poll() is not KVPoll.WaitingForInput)  # noqa: B023
                receiver.abort("client gone")
                assert receiver.release_safe()
                for region in pages.regions:
                    region.fill_(7)
                torch.cuda.synchronize()
                receiver.clear()
                for region in pages.regions:
                    assert bool((region == 7).all())
            for region in pages.regions:
                region.zero_()
            fetch(manager, pages, process, address, 20)
    finally:
        manager.close()


@pytest.mark.gpu
def test_unequal_tp_sizes_on_a_device() -> None:
    """Two prefill ranks in this process, one decode rank: the heads of each token row come from both."""
    server = BootstrapServer("127.0.0.1", 0)
    pages = DevicePages(last_device(), heads=4)
    sources = [DevicePages("cuda:0", fill=True, heads=2, seed=rank) for rank in range(2)]
    decode = TcpKVManager(pages.args(), "decode", OPTIONS)
    prefill = [
        TcpKVManager(source.args(tp_rank=rank, tp_size=2, total_kv_head_num=4), "prefill", OPTIONS, server.address, "s")
        for rank, source in enumerate(sources)
    ]
    try:
        receiver = decode.create_receiver(1, server.address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        order = np.random.default_rng(5).permutation(pages.num_pages)
        receiver.send_metadata(order, 0)
        for manager in prefill:
            sender = manager.create_sender(1)
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(pages.num_pages, 0)
            sender.send(np.arange(pages.num_pages), last=True)
        wait_for(receiver, KVPoll.Success)
        for i, have in enumerate(pages.regions):
            rows = have[torch.from_numpy(order)].view(pages.num_pages, 16, 2, -1)
            for rank, source in enumerate(sources):
                want = source.regions[i].view(pages.num_pages, 16, -1)
                assert torch.equal(rows[:, :, rank].cpu(), want.cpu())
    finally:
        decode.close()
        for manager in prefill:
            manager.close()
        server.close()
