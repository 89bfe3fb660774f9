"""The common shape of every real KV manager: one end of the control plane and a backend's mover."""

from __future__ import annotations

from collections.abc import Callable

from disagg.base import KVArgs, Role, TransferOptions
from disagg.decode_end import DecodeEnd
from disagg.mover import DecodeEvents, DecodeMover, PrefillMover
from disagg.prefill_end import PrefillEnd
from disagg.receiver import Receiver
from disagg.sender import Sender


class TransferManager:
    """One rank's end. A prefill rank registers at `bootstrap_addr` (host:port); raises if it cannot.

    `incarnation` must be the same for all ranks of one server and new at each start.
    """

    def __init__(
        self,
        kv_args: KVArgs,
        role: Role,
        options: TransferOptions | None,
        bootstrap_addr: str | None,
        incarnation: str | None,
        backend: str,
        prefill_mover: Callable[[KVArgs, TransferOptions], PrefillMover],
        decode_mover: Callable[[KVArgs, TransferOptions, DecodeEvents], DecodeMover],
    ) -> None:
        self.kv_args = kv_args
        options = options or TransferOptions()
        self._end: PrefillEnd | DecodeEnd
        if role == "prefill":
            self._end = PrefillEnd(kv_args, options, bootstrap_addr, incarnation, backend, prefill_mover)
        else:
            self._end = DecodeEnd(kv_args, options, incarnation, backend, decode_mover)
        self.wake_fd = self._end.wake.fd

    def create_sender(self, room: int) -> Sender:
        if not isinstance(self._end, PrefillEnd):
            raise TypeError("a decode rank has no senders")
        return Sender(self._end, room)

    def create_receiver(self, room: int, bootstrap_addr: str) -> Receiver:
        if not isinstance(self._end, DecodeEnd):
            raise TypeError("a prefill rank has no receivers")
        return Receiver(self._end, room, bootstrap_addr)

    def num_rooms(self) -> int:
        return len(self._end.rooms)

    def close(self) -> None:
        self._end.close()
