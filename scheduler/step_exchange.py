"""How the ranks of an engine come to run the same steps: rank 0 gives every other rank its messages step by step.

All ranks run the same scheduler. It decides from requests, messages and memory alone, never from clocks, so ranks that
get the same messages before the same steps make the same batches. Rank 0, the leader, takes messages from the API
process when it begins a step and sends each follower what it took; a follower begins its step when that arrives. A
follower with nothing to do therefore sleeps in a read, and only the leader decides how long an idle engine waits.

With every step the leader says what its scheduler looks like, and a follower that differs stops instead of hanging in a
collective later.
"""

from __future__ import annotations

import logging
import os
import zlib
from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from scheduler.messages import Inbound, RequestOutput, decode_inbound
from scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# A silence is believed when it has lasted through so many waits: after one wait alone this process may itself have been
# suspended.
_WAITS = 4


class PeerLost(RuntimeError):
    """Another rank of the engine is gone or silent."""


class Desync(RuntimeError):
    """This rank's scheduler is not where the leader's is."""


class StepState(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal on all ranks when a step begins. tokens: a checksum of those the last step gave out."""

    live_requests: int = 0
    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, outputs: Sequence[RequestOutput]) -> StepState:
        tokens = array("q", (token for output in outputs for token in output.token_ids))
        return cls(
            len(scheduler.requests),
            len(scheduler.waiting),
            len(scheduler.prefilling),
            len(scheduler.decoding),
            scheduler.memory.allocator.num_free,
            scheduler.memory.cache.num_evictable,
            zlib.crc32(tokens.tobytes()),
        )


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """The leader's word to a follower. messages: encoded `Inbound` ones, in order."""

    step: int
    state: StepState
    messages: list[bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)


class StepExchange(Protocol):
    def begin(self, outputs: Sequence[RequestOutput], wait_ms: int) -> list[Inbound]:
        """The messages to handle before the next step, the same on every rank.

        outputs: of the step before. wait_ms: how long the leader waits for a first message; followers wait for the
        leader. PeerLost, Desync.
        """


class Leader:
    """Rank 0, alone or with followers.

    inbound: address bound by the API process. followers: addresses that this rank binds, one a follower.
    wake_fd: an eventfd that ends a wait like a message does, and is drained; -1 for none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        scheduler: Scheduler,
        inbound: str,
        followers: Sequence[str] = (),
        wake_fd: int = -1,
    ) -> None:
        self._scheduler = scheduler
        self._inbound = context.socket(zmq.PULL)
        self._inbound.set_hwm(0)
        self._inbound.connect(inbound)
        self._followers = [context.socket(zmq.PUSH) for _ in followers]
        for socket, address in zip(self._followers, followers, strict=True):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._inbound, zmq.POLLIN)
        self._wake_fd = wake_fd
        if wake_fd >= 0:
            self._poller.register(wake_fd, zmq.POLLIN)
        self._step = 0

    def begin(self, outputs: Sequence[RequestOutput], wait_ms: int) -> list[Inbound]:
        if wait_ms or self._wake_fd >= 0:
            ready = dict(self._poller.poll(wait_ms))
            # Drained before the step looks at the transfers, so that nothing that happens after its look is missed.
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
        messages: list[Inbound] = []
        encoded: list[bytes] = []
        while True:
            try:
                data = self._inbound.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(decode_inbound(data))
                encoded.append(data)
            except msgspec.DecodeError as error:
                logger.error("a message of %d bytes cannot be read and is dropped: %s", len(data), error)
        if self._followers:
            self._step += 1
            state = StepState.of(self._scheduler, outputs)
            word = _encoder.encode(StepMessage(self._step, state, encoded))
            for socket in self._followers:
                socket.send(word)
        return messages


class Follower:
    """Any other rank. address: bound by the leader. silence: seconds without a word after which the leader is lost."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], scheduler: Scheduler, address: str, silence: float
    ) -> None:
        self._scheduler = scheduler
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._silence = silence
        self._step = 0

    def begin(self, outputs: Sequence[RequestOutput], wait_ms: int) -> list[Inbound]:
        waits = 0
        while not self._socket.poll(max(1, round(1000 * self._silence / _WAITS))):
            waits += 1
            if waits == _WAITS:
                raise PeerLost(f"rank 0 has said nothing for {self._silence:g} s")
        word = _decoder.decode(self._socket.recv())
        self._step += 1
        if word.step != self._step:
            raise Desync(f"rank 0 is at step {word.step}, this rank at step {self._step}")
        state = StepState.of(self._scheduler, outputs)
        if word.state != state:
            raise Desync(f"step {self._step}: {_first_difference(word.state, state)}")
        return [decode_inbound(data) for data in word.messages]


def _first_difference(leader: StepState, own: StepState) -> str:
    for name in StepState.__struct_fields__:
        theirs, ours = getattr(leader, name), getattr(own, name)
        if theirs != ours:
            return f"{name} is {theirs} on rank 0 and {ours} on this rank"
    raise AssertionError("the states are equal")
