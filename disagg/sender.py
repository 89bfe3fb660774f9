"""What a prefill scheduler holds of one room."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.base import Indices, KVPoll, KVTransferError
from disagg.prefill_end import PrefillEnd


class Sender:
    """See KVSender."""

    def __init__(self, end: PrefillEnd, room: int) -> None:
        self._end = end
        self._outgoing = end.open(room)

    def skip_pages(self) -> int:
        return self._end.skip_pages(self._outgoing)

    def init(self, num_pages: int, aux_index: int) -> None:
        self._outgoing.num_pages = num_pages
        self._outgoing.aux_index = aux_index

    def send(
        self, page_indices: Indices, state_indices: Sequence[Indices] = (), last: bool = False, note: bytes = b""
    ) -> None:
        self._end.send(self._outgoing, page_indices, state_indices, last, note)

    def poll(self) -> KVPoll:
        return self._end.rooms.status(self._outgoing.room)

    def failure(self) -> KVTransferError:
        return self._end.failure(self._outgoing)

    def abort(self, reason: str = "aborted") -> None:
        self._end.abort(self._outgoing, reason)

    def clear(self) -> None:
        self._end.clear(self._outgoing)
