"""Numpy memory with KVArgs for it, and short ways through one transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from disagg.base import KVArgs, KVManager, KVPoll, KVReceiver, KVSender, StateComponent, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.registry import KV_MANAGERS

OPTIONS = TransferOptions(heartbeat_interval=0.2, heartbeat_failures=3, bootstrap_timeout=10, waiting_timeout=10)
ROWS = 8


class Memory:
    """Regions of [items, item bytes] for KV, two state kinds and two metadata arrays."""

    def __init__(self, pages: int = 64, regions: int = 4, page_bytes: int = 512, fill: int | None = None) -> None:
        rng = np.random.default_rng(fill)

        def make(items: int, width: int) -> np.ndarray:
            if fill is None:
                return np.zeros((items, width), dtype=np.uint8)
            return rng.integers(0, 256, (items, width), dtype=np.uint8)

        self.kv = [make(pages, page_bytes + 64 * (i % 2)) for i in range(regions)]
        self.window = [make(32, 96), make(32, 160)]
        self.row_state = [make(ROWS, 40)]
        self.aux = [make(ROWS, 64), make(ROWS, 128)]

    def args(self, **changes: object) -> KVArgs:
        def described(arrays: list[np.ndarray]) -> tuple[list[int], list[int], list[int]]:
            return [a.ctypes.data for a in arrays], [a.nbytes for a in arrays], [a.shape[1] for a in arrays]

        kv, aux = described(self.kv), described(self.aux)
        args = KVArgs(
            model="tiny",
            page_size=16,
            kv_dtype="bfloat16",
            kv_layout="layer-page",
            kv_head_num=2,
            total_kv_head_num=2,
            kv_data_ptrs=kv[0],
            kv_data_lens=kv[1],
            kv_item_lens=kv[2],
            kv_layer_ids=list(range(len(self.kv))),
            aux_data_ptrs=aux[0],
            aux_data_lens=aux[1],
            aux_item_lens=aux[2],
            state=[
                StateComponent("swa", *described(self.window)),
                StateComponent("request_row", *described(self.row_state)),
            ],
        )
        return replace(args, **changes)  # type: ignore[arg-type]


def wait_for(end: KVSender | KVReceiver, wanted: KVPoll, timeout: float = 8.0) -> None:
    """Poll until `wanted`; a room that fails instead raises its reason."""
    limit = time.monotonic() + timeout
    while (status := end.poll()) is not wanted:
        if status is KVPoll.Failed:
            raise end.failure()
        assert time.monotonic() < limit, f"still {status.name} after {timeout} s, wanted {wanted.name}"
        time.sleep(0.001)


def wait_until(condition: Callable[[], bool], timeout: float = 8.0) -> None:
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, f"condition not met in {timeout} s"
        time.sleep(0.001)


class Pair:
    """A prefill and a decode manager of one backend in this process, with their memory."""

    def __init__(self, backend: str, options: TransferOptions = OPTIONS, **sizes: int) -> None:
        self.source = Memory(fill=1, **sizes)
        self.target = Memory(**sizes)
        self.server = BootstrapServer("127.0.0.1", 0)
        cls = KV_MANAGERS[backend]
        self.prefill: KVManager = cls(self.source.args(), "prefill", options, self.server.address)
        self.decode: KVManager = cls(self.target.args(), "decode", options)

    def ends(self, room: int) -> tuple[KVSender, KVReceiver]:
        sender = self.prefill.create_sender(room)
        receiver = self.decode.create_receiver(room, self.server.address)
        receiver.init()
        return sender, receiver

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.server.close()


@contextmanager
def pair_of(backend: str, options: TransferOptions = OPTIONS, **sizes: int) -> Iterator[Pair]:
    pair = Pair(backend, options, **sizes)
    try:
        yield pair
    finally:
        pair.close()


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)
