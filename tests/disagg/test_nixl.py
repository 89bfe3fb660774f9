"""What is particular to the nixl backend: its library, its settings, its sessions, and when its threads sleep."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from disagg import nixl, nixl_agent
from disagg.base import KVPoll, TransferOptions
from disagg.mover import KV_PAGES, Job, PeerMemory
from disagg.nixl import NixlDecode, NixlKVManager, NixlPrefill
from disagg.nixl_agent import load_library
from disagg.pages import Slices
from tests.disagg.support import OPTIONS, Memory, ints, pair_of, wait_for, wait_until

pytestmark = pytest.mark.timeout(360, method="thread")  # may hang in a library, deaf to signals


class Events:
    """Reports of a decode mover; none is expected."""

    def arrived(self, peer_id: int, transfer_id: int) -> None:
        raise AssertionError

    def failed(self, transfer_id: int, reason: str) -> None:
        raise AssertionError

    def lost(self, peer_id: int, reason: str) -> None:
        raise AssertionError


def peer_memory(memory: Memory, endpoint: bytes) -> PeerMemory:
    args = memory.args()
    return PeerMemory(
        name="decode rank",
        host="127.0.0.1",
        endpoint=endpoint,
        kv_data_ptrs=args.kv_data_ptrs,
        kv_item_lens=args.kv_item_lens,
        state_data_ptrs=[component.data_ptrs for component in args.state],
        state_item_lens=[component.item_lens for component in args.state],
    )


def test_missing_package_is_one_line_naming_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lockstep\[nixl\]'") as raised:
        NixlKVManager(Memory().args(), "decode")
    assert "--disaggregation-transfer-backend nixl" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("cuda", "name"), [("12.8", "nixl_cu12"), ("13.0", "nixl_cu13"), (None, "nixl_cu13")])
def test_of_two_packages_the_one_for_torch_is_taken(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert load_library().name == name


def test_loading_leaves_the_logging_of_the_process_alone() -> None:
    load_library()
    assert logging.raiseExceptions
    assert not logging.getLogger("nixl").isEnabledFor(logging.INFO)


def test_memory_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="moves cpu and cuda memory, kv_args.device is 'mps'"):
        NixlKVManager(Memory().args(device="mps"), "decode")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_memory_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="NIXL cannot use the memory of cuda:0"):
        NixlKVManager(Memory().args(device="cuda:0"), "decode")


def test_ucx_settings_are_for_one_agent_only_and_never_replace_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with nixl_agent._ucx_settings(TransferOptions(host="::1", same_host_path=False)):
        assert (os.environ["UCX_NET_DEVICES"], os.environ["UCX_TLS"]) == ("lo", "^shm")
    with nixl_agent._ucx_settings(TransferOptions(host="10.0.0.7")):
        assert "UCX_NET_DEVICES" not in os.environ and "UCX_TLS" not in os.environ
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    with nixl_agent._ucx_settings(TransferOptions()):
        assert os.environ["UCX_NET_DEVICES"] == "eth7"
    assert os.environ["UCX_NET_DEVICES"] == "eth7" and "UCX_TLS" not in os.environ


def test_on_a_loopback_address_nothing_listens_elsewhere() -> None:
    before = _listening_addresses()
    with pair_of("nixl"):
        opened = [address for address in _listening_addresses() if address not in before]
    assert opened
    assert all(address.endswith("7F") for address in opened), opened


def _listening_addresses() -> list[str]:
    """Local addresses of this process's listening IPv4 sockets, "port/address in little-endian hex"."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return ["/".join(reversed(row[1].split(":"))) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_a_connection_whose_setting_up_stands_still_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode rank makes no calls before the second attempt."""
    monkeypatch.setattr(nixl, "_ATTEMPT_TIMEOUT", 0.5)
    attempts: list[nixl.NixlSession] = []
    again, done = threading.Event(), threading.Event()
    connect = nixl.NixlSession.connect

    def counted(session: nixl.NixlSession) -> None:
        attempts.append(session)
        if len(attempts) == 2:
            again.set()
        connect(session)

    def progress() -> None:
        assert again.wait(60)
        while not done.wait(0.001):
            silent.nixl.get_new_notifs()

    monkeypatch.setattr(nixl.NixlSession, "connect", counted)
    memory = Memory()
    mover = NixlPrefill(Memory(fill=1).args(), OPTIONS)
    silent = nixl_agent.Agent(memory.args(), replace(OPTIONS, same_host_path=False))
    thread = threading.Thread(target=progress)
    thread.start()
    try:
        session = mover.open(peer_memory(memory, silent.endpoint()), lambda reason: None)
        assert len(attempts) >= 2
        assert session is attempts[-1]
        assert [attempt.closed for attempt in attempts[:-1]] == [True] * (len(attempts) - 1)
        session.close()
    finally:
        done.set()
        again.set()
        thread.join(60)
        mover.close()
        silent.close()


def test_decode_rank_that_does_not_answer_and_strange_endpoints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_CONNECT_TIMEOUT", 0.3)
    memory = Memory()
    mover = NixlPrefill(Memory(fill=1).args(), replace(OPTIONS, heartbeat_failures=4))
    silent = nixl_agent.Agent(memory.args(), replace(OPTIONS, same_host_path=False))
    try:
        with pytest.raises(OSError, match=r"no connection within 1 s"):
            mover.open(peer_memory(memory, silent.endpoint()), lambda reason: None)
        with pytest.raises(OSError, match="decode rank sent no NIXL endpoint"):
            mover.open(peer_memory(memory, b"\xff?"), lambda reason: None)
        strange = msgspec.msgpack.encode(nixl_agent.Endpoint(b"not metadata", "DRAM", 0, 0))
        with pytest.raises(OSError, match="NIXL cannot write to decode rank"):
            mover.open(peer_memory(memory, strange), lambda reason: None)
    finally:
        mover.close()
        silent.close()


@pytest.mark.parametrize("same_host", [True, False])
def test_lost_decode_rank_is_reported_once_and_its_jobs_end_with_the_session(same_host: bool) -> None:
    options = replace(OPTIONS, same_host_path=same_host)
    source, target = Memory(fill=1), Memory()
    decode = NixlDecode(target.args(), options, Events())
    prefill = NixlPrefill(source.args(), options)
    lost: list[str] = []
    lost_event = threading.Event()

    def on_lost(reason: str) -> None:
        lost.append(reason)
        lost_event.set()

    try:
        session = prefill.open(peer_memory(target, decode.endpoint(1)), on_lost)
        decode.joined(1)
        ends: list[str | None] = []
        finished = threading.Event()

        def job(transfer_id: int) -> Job:
            def on_finish(error: str | None) -> None:
                ends.append(error)
                finished.set()

            slices = Slices.whole(source.args().kv_item_lens)
            return Job(transfer_id, KV_PAGES, ints(1, 2), 0, ints(5, 9), slices, lambda: False, on_finish)

        decode.expect(1, 7, None)  # type: ignore[arg-type]
        session.submit(job(7))
        assert finished.wait(60) and ends == [None]
        np.testing.assert_array_equal(target.kv[1][[5, 9]], source.kv[1][[1, 2]])
        decode.release(7)
        assert decode.forget(1) is not same_host
        if same_host:
            # What goes through shared memory needs nothing of the agent, so cut off the way of this side.
            session._agent.nixl.remove_remote_agent(session._remote)
        session.submit(job(8))
        assert lost_event.wait(60)
        session.submit(job(9))
        session.close()
        assert len(lost) == 1 and "NIXL cannot write to decode rank" in lost[0]
        assert ends == [None, lost[0], lost[0]]
    finally:
        prefill.close()
        decode.close()


@pytest.mark.parametrize("same_host", [True, False])
def test_threads_sleep_when_nothing_is_under_way(same_host: bool) -> None:
    with pair_of("nixl", replace(OPTIONS, heartbeat_interval=2.0, same_host_path=same_host)) as pair:
        for room in (1, 2):
            sender, receiver = pair.ends(room)
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(ints(1), 0)
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(1, 0)
            if room == 1:
                sender.send(ints(1), last=True)
                wait_for(receiver, KVPoll.Success)
                wait_for(sender, KVPoll.Success)
            else:
                receiver.abort("client gone")
                wait_for(sender, KVPoll.Failed)
                wait_until(receiver.release_safe)
            sender.clear()
            receiver.clear()
        wait_until(lambda: pair.decode._end.mover.active() == 0)  # type: ignore[attr-defined]
        threads = [thread.native_id for thread in threading.enumerate() if thread.name == "kv-nixl"]
        assert len(threads) == 2
        before = [_nanoseconds(thread) for thread in threads]
        threading.Event().wait(1.0)
        # A thread that looks every two milliseconds would take about 20 ms.
        assert max(_nanoseconds(thread) - start for thread, start in zip(threads, before, strict=True)) < 5_000_000


def _nanoseconds(thread: int | None) -> int:
    """Processor time of a thread so far."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_pages_of_a_cuda_device_arrive(devices: tuple[str, str], checksum: bool) -> None:
    from disagg.bootstrap import BootstrapServer

    options = replace(OPTIONS, checksum=checksum)
    memories = [Memory(fill=1), Memory()]
    tensors = [
        [torch.from_numpy(region).to(device) for region in memory.kv]
        for memory, device in zip(memories, devices, strict=True)
    ]
    args = [
        replace(memory.args(device=device, state=[]), kv_data_ptrs=[tensor.data_ptr() for tensor in held])
        for memory, device, held in zip(memories, devices, tensors, strict=True)
    ]
    server = BootstrapServer("127.0.0.1", 0)
    prefill = NixlKVManager(args[0], "prefill", options, server.address)
    decode = NixlKVManager(args[1], "decode", options)
    try:
        sender, receiver = prefill.create_sender(1), decode.create_receiver(1, server.address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(9, 4, 5, 40), 0)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(4, 0)
        sender.send(ints(3, 1, 2, 63), last=True)
        wait_for(receiver, KVPoll.Success)
        for have, want in zip(tensors[1], tensors[0], strict=True):
            torch.testing.assert_close(have[[9, 4, 5, 40]].cpu(), want[[3, 1, 2, 63]].cpu())
    finally:
        decode.close()
        prefill.close()
        server.close()
