"""What the benchmarks of KV managers share: a manager for some regions, and transfers of all their pages in a row."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from disagg.base import KVArgs, KVManager, KVPoll, KVReceiver, KVSender, Role, TransferOptions
from disagg.registry import KV_MANAGERS

OPTIONS = TransferOptions(bootstrap_timeout=60, heartbeat_interval=10)
# Held here: a manager knows no more than its address.
_METADATA_ROWS = np.ones((1, 64), dtype=np.uint8)


def make_manager(
    backend: str,
    role: Role,
    options: TransferOptions,
    addresses: Sequence[int],
    shape: tuple[int, int, int],
    device: str = "cpu",
    bootstrap_addr: str | None = None,
) -> KVManager:
    """addresses: of the regions. shape: regions, pages, bytes of a page in one region."""
    regions, pages, page_bytes = shape
    args = KVArgs(
        model="benchmark",
        page_size=16,
        kv_dtype="uint8",
        kv_layout="region-page",
        kv_head_num=1,
        total_kv_head_num=1,
        kv_data_ptrs=list(addresses),
        kv_data_lens=[pages * page_bytes] * regions,
        kv_item_lens=[page_bytes] * regions,
        kv_layer_ids=list(range(regions)),
        aux_data_ptrs=[_METADATA_ROWS.ctypes.data],
        aux_data_lens=[_METADATA_ROWS.nbytes],
        aux_item_lens=[_METADATA_ROWS.shape[1]],
        device=device,
    )
    return KV_MANAGERS[backend](args, role, options, bootstrap_addr)


def send_all(pipe: Connection, manager: KVManager, order: np.ndarray, repeats: int) -> None:
    """Send the pages in this order, so many times, and tell the other end when each begins."""
    for room in range(1, repeats + 1):
        sender = manager.create_sender(room)
        _wait_for(manager, sender, KVPoll.WaitingForInput)
        sender.init(len(order), 0)
        pipe.send(time.monotonic())
        sender.send(order, last=True)
        _wait_for(manager, sender, KVPoll.Success)
        sender.clear()


def receive_all(pipe: Connection, manager: KVManager, address: str, order: np.ndarray, repeats: int) -> list[float]:
    """Seconds of each transfer of `send_all` into the pages in this order. address: of the bootstrap server."""
    seconds = []
    for room in range(1, repeats + 1):
        receiver = manager.create_receiver(room, address)
        receiver.init()
        _wait_for(manager, receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(order, 0)
        started = float(hear(pipe))  # type: ignore[arg-type]
        _wait_for(manager, receiver, KVPoll.Success)
        seconds.append(time.monotonic() - started)
        receiver.clear()
    return seconds


def hear(pipe: Connection, timeout: float = 60.0) -> object:
    """What the sending process says next. TimeoutError when it says nothing for so many seconds."""
    if not pipe.poll(timeout):
        raise TimeoutError(f"the sending process has not answered for {timeout:g} s")
    return pipe.recv()


def _wait_for(manager: KVManager, end: KVSender | KVReceiver, wanted: KVPoll) -> None:
    """Sleeps on the manager's descriptor, as a scheduler does."""
    while (status := end.poll()) is not wanted:
        if status is KVPoll.Failed:
            raise end.failure()
        if select.select([manager.wake_fd], [], [], 60)[0]:
            os.eventfd_read(manager.wake_fd)
