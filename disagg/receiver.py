"""What a decode scheduler holds of one room."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.base import Indices, KVPoll, KVTransferError
from disagg.decode_end import DecodeEnd


class Receiver:
    """See KVReceiver."""

    def __init__(self, end: DecodeEnd, room: int, bootstrap_addr: str) -> None:
        self._end = end
        self._bootstrap_addr = bootstrap_addr
        self._incoming = end.open(room)

    def init(self, prefill_dp_rank: int = 0) -> None:
        self._end.init(self._incoming, self._bootstrap_addr, prefill_dp_rank)

    def send_metadata(
        self, page_indices: Indices, aux_index: int, state_indices: Sequence[Indices] = (), skip_pages: int = 0
    ) -> None:
        self._end.publish(self._incoming, page_indices, aux_index, state_indices, skip_pages)

    def poll(self) -> KVPoll:
        return self._end.rooms.status(self._incoming.room)

    def note(self) -> bytes:
        return self._incoming.note

    def failure(self) -> KVTransferError:
        return self._end.failure(self._incoming)

    def abort(self, reason: str = "aborted") -> None:
        self._end.abort(self._incoming, reason)

    def release_safe(self) -> bool:
        return self._incoming.release_safe()

    def clear(self) -> None:
        self._end.clear(self._incoming)
