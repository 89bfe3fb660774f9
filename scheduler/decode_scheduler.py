"""The scheduler of a decode server: takes over requests whose prompts a prefill server has computed.

    connecting ───────────► receiving ──────────► decoding ──► finished
      until the prefill side     until KV and          │  ▲
      is known and there is      metadata row          ▼  │
      memory for the prompt      are here         waiting ──► prefilling
                                                    after a retraction its KV is computed again, here

The first token comes with the metadata row and is told to the client from here; it has no KV yet, so the first decode
step computes position `prompt_length`.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from disagg.base import KVPoll, KVReceiver
from disagg.fake import first_token
from scheduler.admission import request_keys, usable_prefix
from scheduler.batch import ItemResult
from scheduler.hand_over import HandOver
from scheduler.hand_over_scheduler import HandOverScheduler
from scheduler.memory import KVMemory, MemoryLeak
from scheduler.messages import Bootstrap, Finish, LoadReport
from scheduler.metadata_rows import Metadata, Note, decode_note
from scheduler.radix_cache import PageKey
from scheduler.request import Incoming, Request, RequestState, Residence
from scheduler.scheduler import SchedulerLimits


class DecodeScheduler(HandOverScheduler[KVReceiver]):
    """reserved_tokens: kept free for the further output of each resident request before another is taken in."""

    role = "decode"

    def __init__(
        self,
        memory: KVMemory,
        limits: SchedulerLimits,
        eos_token_ids: tuple[int, ...],
        hand_over: HandOver,
        reserved_tokens: int,
    ) -> None:
        super().__init__(memory, limits, eos_token_ids, hand_over)
        self.reserved_tokens = reserved_tokens
        self.connecting: list[Request] = []
        self.receiving: list[Request] = []
        # Of ended requests whose pages a writer may still touch.
        self.held: list[tuple[KVReceiver, Residence]] = []

    @property
    def is_idle(self) -> bool:
        return not self.requests and not self.held

    @property
    def num_queued(self) -> int:
        return len(self.connecting) + len(self.waiting)

    def check_memory(self) -> None:
        residences = [r.residence for r in self.requests.values() if r.residence is not None]
        self.memory.check(residences + [residence for _, residence in self.held])
        rooms = self.hand_over.num_rooms
        if self.is_idle and (rooms or self.hand_over.rows.array.any()):
            raise MemoryLeak(f"metadata rows {self.hand_over.rows.array.nonzero()[0]} and {rooms} rooms are left over")

    def load(self, rank: int) -> LoadReport:
        return msgspec.structs.replace(
            super().load(rank),
            connecting_requests=len(self.connecting),
            receiving_requests=len(self.receiving),
            **self.hand_over.totals(),
        )

    # Requests coming

    def _create_end(self, bootstrap: Bootstrap) -> KVReceiver:
        return self.hand_over.create_receiver(bootstrap)

    def _begin(self, request: Request, end: KVReceiver) -> None:
        assert request.message.bootstrap is not None
        request.prompt_logprobs = None  # the prefill side gathers them
        request.transfer = Incoming(end)
        request.kv_is_fake = self.hand_over.is_fake(request.message.bootstrap)
        request.state = RequestState.CONNECTING
        self.connecting.append(request)

    # Between steps

    def _before_step(self) -> None:
        self._release_held()
        under_way = self.connecting + self.receiving
        states = self.hand_over.poll([_incoming(request).receiver for request in under_way])
        connected, arrived = [], []
        for request, state in zip(under_way, states, strict=True):
            if state is KVPoll.Failed:
                self._fail(request, *self.hand_over.failure(_incoming(request).receiver))
            elif request.state is RequestState.CONNECTING and state is KVPoll.WaitingForInput:
                connected.append(request)
            elif request.state is RequestState.RECEIVING and state is KVPoll.Success:
                arrived.append(request)
        # Retracted requests come first: what is taken in meanwhile would only keep them out. But where those that run
        # are stuck, what has arrived holds the memory they need, and gives it back only by being retracted in turn.
        retracted = bool(self.waiting)
        if not retracted:
            self._take_in(connected)
        for request in self.receiving:
            self._offer_pages(request)
        if not (retracted and (self.prefilling or self.decoding) and not self._stalled):
            for request in arrived:
                self._take_over(request)

    def _release_held(self) -> None:
        safe = self.hand_over.all_safe([receiver for receiver, _ in self.held])
        for (_, residence), is_safe in zip(self.held, safe, strict=True):
            if is_safe:
                self._release(residence)
        self.held = [entry for entry, is_safe in zip(self.held, safe, strict=True) if not is_safe]

    def _release(self, residence: Residence) -> None:
        self.hand_over.rows.clear(residence.row)
        self.memory.release(residence)

    def _take_in(self, connected: list[Request]) -> None:
        """Memory for as many as there is some for, in order of arrival; nobody overtakes one that has to wait."""
        for request in connected:
            if not self._has_room(request):
                return
            residence = self.memory.admit(request, usable_prefix(request, self.memory))
            if residence is None:
                return
            self.memory.map(residence)
            incoming = _incoming(request)
            incoming.fence = self.batches_launched
            request.residence = residence
            request.state = RequestState.RECEIVING
            self.connecting.remove(request)
            self.receiving.append(request)

    def _has_room(self, request: Request) -> bool:
        residents = [*self.receiving, *self.prefilling, *self.decoding]
        if not residents and not self.held:
            return True  # the whole pool is its own
        reserved = sum(
            min(self.reserved_tokens, max(0, resident.max_new_tokens - resident.launched))
            for resident in [*residents, request]
        )
        page_size = self.memory.page_size
        prompt = self.memory.pages_for(request.num_tokens) * page_size
        return prompt + reserved <= self.memory.available_pages * page_size

    def _offer_pages(self, request: Request) -> None:
        """Tell the prefill side where to write, once no launched step can write there any more.

        A step launched before its request ended still writes that request's next position, to a page that may have
        been given to this one since. Within the device the order of launches keeps that right; writes from outside
        know no such order.
        """
        incoming, residence = _incoming(request), request.residence
        assert residence is not None
        if incoming.fence is None or self.batches_processed < incoming.fence:
            return
        incoming.fence = None
        incoming.started = time.monotonic()
        skip = residence.shared_pages
        pages = np.asarray(residence.pages[skip:], dtype=np.int64)
        incoming.receiver.send_metadata(pages, residence.row, skip_pages=skip)

    def _take_over(self, request: Request) -> None:
        """Everything is here: the request decodes from this step on, unless its first token was its last."""
        incoming, residence = _incoming(request), request.residence
        assert residence is not None and request.message.bootstrap is not None
        room = request.message.bootstrap.room
        if request.kv_is_fake:
            token = first_token(request.rid, self.limits.vocab_size) if request.max_new_tokens else -1
            metadata, note = Metadata(room, token, 0), Note()
        else:
            metadata = self.hand_over.rows.read(residence.row)
            try:
                note = decode_note(incoming.receiver.note())
            except msgspec.DecodeError as error:
                self._fail(request, f"the note of room {room} cannot be read: {error}")
                return
        lowest = 0 if request.max_new_tokens else -1
        if metadata.room != room or not lowest <= metadata.token < self.limits.vocab_size:
            self._fail(request, f"the metadata row of room {room} is corrupt: {metadata}")
            return
        self.hand_over.count_success(request.prompt_length, incoming.started)
        self.hand_over.rows.clear(residence.row)
        incoming.receiver.clear()
        request.transfer = None
        self.receiving.remove(request)
        self.decoding.append(request)
        request.state = RequestState.DECODING
        residence.computed = request.prompt_length
        request.cached_tokens = metadata.cached_tokens
        request.prompt_logprobs = note.prompt_logprobs
        self.prompt_tokens_total += request.prompt_length
        self.cached_tokens_total += request.cached_tokens
        sampled = metadata.token >= 0
        result = ItemResult(metadata.token)
        if sampled:
            request.launched = 1
            self._seeds.append((residence.row, metadata.token))
            if note.logprobs is not None:
                result.logprob, result.top = note.logprobs.logprobs[0], note.logprobs.top[0]
        if not request.kv_is_fake:
            self.memory.share(residence, request_keys(request, self.memory))
        output = self._commit(request, result, sampled)
        if output is not None:
            self._early_outputs.append(output)

    # Requests going

    def _leave(self, request: Request, finish: Finish, keys: list[PageKey] | None) -> None:
        if request.transfer is None:
            super()._leave(request, finish, keys)
            return
        receiver, residence = _incoming(request).receiver, request.residence
        receiver.abort(finish.message)
        receiver.clear()
        request.transfer = request.residence = None
        if residence is None:
            self.connecting.remove(request)
            return
        self.receiving.remove(request)
        self.held.append((receiver, residence))


def _incoming(request: Request) -> Incoming:
    assert isinstance(request.transfer, Incoming)
    return request.transfer
