"""How the ranks of an engine come to run the same steps: rank 0 gives every other rank its messages step by step.

The ranks of one data-parallel group run the same scheduler. It decides from requests, messages and memory alone, never
from clocks, so ranks that get the same messages before the same steps make the same batches. Rank 0, the leader, takes
messages from the API process when it begins a step and sends each follower those of its group; a follower begins its
step when they arrive. A follower with nothing to do therefore sleeps in a read, and only the leader decides how long an
idle engine waits. Nobody can be left asleep: whoever is to work hears of it from the one that everybody listens to.

With one group the leader also says what its scheduler looks like, and a follower that differs stops instead of hanging
in a collective later. With several, `scheduler.lockstep` compares the ranks of each group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import zmq

from scheduler.messages import ControlRequest, Inbound, RequestOutput, decode_inbound
from scheduler.scheduler import Scheduler
from scheduler.step_plan import Desync, StepState, first_difference

logger = logging.getLogger(__name__)

# A silence is believed when it has lasted through so many waits: after one wait alone this process may itself have been
# suspended.
_WAITS = 4
# For what was said last before this process ends.
_LINGER_MS = 1000


class PeerLost(RuntimeError):
    """Another rank of the engine is gone or silent."""


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """The leader's word to a follower. state: the leader's, for followers of its own data-parallel group.

    is_busy: see `Begin`. messages: encoded `Inbound` ones, in order.
    """

    step: int
    state: StepState | None
    is_busy: bool
    messages: list[bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)


class Begin(NamedTuple):
    """What a step begins with.

    messages: for this rank's group, the same on every rank of it. is_busy: whether any rank of the engine has or gets
    something to do; the same on all ranks.
    """

    messages: list[Inbound]
    is_busy: bool


class StepExchange(Protocol):
    """One rank's way into each step; every rank of the engine makes the same number of calls."""

    def begin(self, outputs: Sequence[RequestOutput], wait_ms: int, is_busy: bool) -> Begin:
        """outputs: of the step before. wait_ms: how long the leader waits for a first message; followers wait for it.

        is_busy: whether there is something to do without new messages, as far as this rank knows. PeerLost, Desync.
        """


class FollowerAddress(NamedTuple):
    """A rank as the leader sees it. address: for the leader to bind; port * lets the system choose."""

    address: str
    dp_rank: int


class Leader:
    """Rank 0, alone or with followers.

    inbound: addresses bound by the API process, one a data-parallel group.
    wake_fd: an eventfd that ends a wait like a message does, and is drained; -1 for none.
    bound: the followers' addresses as they were bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        scheduler: Scheduler,
        inbound: Sequence[str],
        followers: Sequence[FollowerAddress] = (),
        wake_fd: int = -1,
    ) -> None:
        self._scheduler = scheduler
        self._poller = zmq.Poller()
        self._inbound = []
        for address in inbound:
            socket = unbounded_socket(context, zmq.PULL)
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            self._inbound.append(socket)
        self._followers = []
        self.bound: list[str] = []
        for follower in followers:
            push = unbounded_socket(context, zmq.PUSH)
            push.bind(follower.address)
            self.bound.append(push.getsockopt_string(zmq.LAST_ENDPOINT))
            self._followers.append((push, follower.dp_rank))
        self._wake_fd = wake_fd
        if wake_fd >= 0:
            self._poller.register(wake_fd, zmq.POLLIN)
        self._step = 0

    def begin(self, outputs: Sequence[RequestOutput], wait_ms: int, is_busy: bool) -> Begin:
        if wait_ms or self._wake_fd >= 0:
            ready = dict(self._poller.poll(wait_ms))
            # Drained before the step looks at the transfers, so that nothing that happens after its look is missed.
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
        taken = [self._take(socket) for socket in self._inbound]
        stopping = [pair for group in taken for pair in group if _is_shutdown(pair[0])]
        if stopping:
            # It comes for each group; no rank may go on when another has gone.
            taken = [[*(pair for pair in group if not _is_shutdown(pair[0])), stopping[0]] for group in taken]
        is_busy = is_busy or any(taken)
        if self._followers:
            self._tell_followers(outputs, is_busy, [[data for _, data in group] for group in taken])
        return Begin([message for message, _ in taken[0]], is_busy)

    def _take(self, socket: zmq.Socket[bytes]) -> list[tuple[Inbound, bytes]]:
        """Everything that has arrived, decoded and as it came."""
        taken: list[tuple[Inbound, bytes]] = []
        while True:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            try:
                taken.append((decode_inbound(data), data))
            except msgspec.DecodeError as error:
                logger.error("a message of %d bytes cannot be read and is dropped: %s", len(data), error)

    def _tell_followers(self, outputs: Sequence[RequestOutput], is_busy: bool, groups: list[list[bytes]]) -> None:
        self._step += 1
        state = StepState.of(self._scheduler, outputs) if len(groups) == 1 else None
        words = [_encoder.encode(StepMessage(self._step, state, is_busy, messages)) for messages in groups]
        for socket, dp_rank in self._followers:
            socket.send(words[dp_rank])


class Follower:
    """Any other rank. address: bound by the leader. silence: seconds without a word after which the leader is lost."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], scheduler: Scheduler, address: str, silence: float
    ) -> None:
        self._scheduler = scheduler
        self._socket = unbounded_socket(context, zmq.PULL)
        self._socket.connect(address)
        self._silence = silence
        self._step = 0

    def begin(self, outputs: Sequence[RequestOutput], wait_ms: int, is_busy: bool) -> Begin:
        waits = 0
        while not self._socket.poll(max(1, round(1000 * self._silence / _WAITS))):
            waits += 1
            if waits == _WAITS:
                raise PeerLost(f"rank 0 has said nothing for {self._silence:g} s")
        word = _decoder.decode(self._socket.recv())
        self._step += 1
        if word.step != self._step:
            raise Desync(f"rank 0 is at step {word.step}, this rank at step {self._step}")
        if word.state is not None:
            state = StepState.of(self._scheduler, outputs)
            if word.state != state:
                name, theirs, own = first_difference(word.state, state)
                raise Desync(f"step {self._step}: {name} is {theirs} on rank 0 and {own} on this rank")
        return Begin([decode_inbound(data) for data in word.messages], word.is_busy)


def unbounded_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Any number of messages may wait in it, where a sender would block at a limit. For both versions of IP."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    return socket


def _is_shutdown(message: Inbound) -> bool:
    return isinstance(message, ControlRequest) and message.kind == "shutdown"
