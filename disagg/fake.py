"""A KV manager that moves nothing and needs no peer: bring-up, decode benchmarks, warm-up and health probes.

The pages of the decode side keep whatever they held, so outputs are not meaningful.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from disagg.base import Indices, KVArgs, KVPoll, KVTransferError, Role, TransferOptions
from disagg.wake import Wake


def first_token(rid: str, vocab_size: int) -> int:
    """Stand-in for the first token, which no prefill computed: a stable hash of the request id."""
    digest = hashlib.blake2b(rid.encode(), digest_size=8, person=b"fake-pd").digest()
    return int.from_bytes(digest, "little") % vocab_size


class FakeKVManager:
    """Senders succeed after a last send, receivers after their metadata."""

    def __init__(
        self,
        kv_args: KVArgs,
        role: Role,
        options: TransferOptions | None = None,
        bootstrap_addr: str | None = None,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv_args = kv_args
        self.options = options or TransferOptions()
        self.clock = clock
        self.live: set[_FakeEnd] = set()
        self.wake = Wake()
        self.wake_fd = self.wake.fd

    def create_sender(self, room: int) -> FakeKVSender:
        return FakeKVSender(self, room)

    def create_receiver(self, room: int, bootstrap_addr: str) -> FakeKVReceiver:
        return FakeKVReceiver(self, room)

    def num_rooms(self) -> int:
        return len(self.live)

    def close(self) -> None:
        self.live.clear()
        self.wake.close()


class _FakeEnd:
    def __init__(self, manager: FakeKVManager, room: int, status: KVPoll) -> None:
        self._manager = manager
        self._room = room
        self._status = status
        self._reason = ""
        manager.live.add(self)
        manager.wake.notify()

    def _rise(self, status: KVPoll) -> None:
        if self._status is not KVPoll.Failed and status > self._status:
            self._status = status
            self._manager.wake.notify()

    def poll(self) -> KVPoll:
        return self._status

    def abort(self, reason: str = "aborted") -> None:
        if self._status is not KVPoll.Failed:
            self._status, self._reason = KVPoll.Failed, reason
            self._manager.wake.notify()

    def failure(self) -> KVTransferError:
        self.clear()
        return KVTransferError(self._room, self._reason or "the room is not known")

    def clear(self) -> None:
        self._manager.live.discard(self)


class FakeKVSender(_FakeEnd):
    """Fails when nothing is sent within waiting_timeout of the first poll after init."""

    def __init__(self, manager: FakeKVManager, room: int) -> None:
        super().__init__(manager, room, KVPoll.WaitingForInput)
        self._initialised = False
        self._first_poll: float | None = None

    def skip_pages(self) -> int:
        return 0

    def init(self, num_pages: int, aux_index: int) -> None:
        self._initialised = True

    def send(
        self, page_indices: Indices, state_indices: Sequence[Indices] = (), last: bool = False, note: bytes = b""
    ) -> None:
        self._rise(KVPoll.Success if last else KVPoll.Transferring)

    def poll(self) -> KVPoll:
        if self._initialised and self._status is KVPoll.WaitingForInput:
            now = self._manager.clock()
            if self._first_poll is None:
                self._first_poll = now
            elif now - self._first_poll > self._manager.options.waiting_timeout:
                self.abort(f"nothing was sent within waiting_timeout ({self._manager.options.waiting_timeout:g} s)")
        return self._status


class FakeKVReceiver(_FakeEnd):
    """Leaves the pages and the metadata row as they are."""

    def __init__(self, manager: FakeKVManager, room: int) -> None:
        super().__init__(manager, room, KVPoll.Bootstrapping)

    def init(self, prefill_dp_rank: int = 0) -> None:
        self._rise(KVPoll.WaitingForInput)

    def send_metadata(
        self, page_indices: Indices, aux_index: int, state_indices: Sequence[Indices] = (), skip_pages: int = 0
    ) -> None:
        self._rise(KVPoll.Success)

    def note(self) -> bytes:
        return b""

    def release_safe(self) -> bool:
        return True
