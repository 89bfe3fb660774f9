"""The scheduler of a prefill server: computes prompts and one token each, and hands both to decode servers.

    bootstrapping ────────► waiting ──► prefilling ─────────► sending ───────► finished
      until the decode side               pages go out chunk    until the decode
      has sent its indices                by chunk              side has them all

A request keeps its pages until the decode side has them, so that nobody else can write to them meanwhile.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from disagg.base import KVPoll, KVSender
from scheduler.admission import request_keys
from scheduler.batch import ItemResult
from scheduler.hand_over import HandOver
from scheduler.hand_over_scheduler import HandOverScheduler
from scheduler.memory import KVMemory
from scheduler.messages import Bootstrap, Finish, GenerateRequest, LoadReport, RequestOutput, TokenLogprobs
from scheduler.metadata_rows import Metadata, Note, encode_note
from scheduler.radix_cache import PageKey
from scheduler.request import Outgoing, Request, RequestState
from scheduler.scheduler import SchedulerLimits


class PrefillScheduler(HandOverScheduler[KVSender]):
    """A request is answered once the decode side has all of it: with its first token, and "length" as the reason."""

    role = "prefill"

    def __init__(
        self, memory: KVMemory, limits: SchedulerLimits, eos_token_ids: tuple[int, ...], hand_over: HandOver
    ) -> None:
        super().__init__(memory, limits, eos_token_ids, hand_over)
        self.bootstrapping: list[Request] = []
        self.sending: list[Request] = []

    @property
    def num_queued(self) -> int:
        return len(self.bootstrapping) + len(self.waiting)

    def load(self, rank: int) -> LoadReport:
        return msgspec.structs.replace(
            super().load(rank),
            bootstrapping_requests=len(self.bootstrapping),
            sending_requests=len(self.sending),
            **self.hand_over.totals(),
        )

    # Requests coming

    def add(self, message: GenerateRequest) -> None:
        # The decode side samples the rest; nothing is to be checked or held back for it here.
        sampling = msgspec.structs.replace(message.sampling, max_new_tokens=min(1, message.sampling.max_new_tokens))
        super().add(msgspec.structs.replace(message, sampling=sampling))

    def _create_end(self, bootstrap: Bootstrap) -> KVSender:
        return self.hand_over.create_sender(bootstrap)

    def _begin(self, request: Request, end: KVSender) -> None:
        request.transfer = Outgoing(end)
        request.state = RequestState.BOOTSTRAPPING
        self.bootstrapping.append(request)

    # Between steps

    def _before_step(self) -> None:
        requests = list(self.requests.values())
        states = self.hand_over.poll([_outgoing(request).sender for request in requests])
        for request, state in zip(requests, states, strict=True):
            if state is KVPoll.Failed:
                self._fail(request, *self.hand_over.failure(_outgoing(request).sender))
            elif request.state is RequestState.BOOTSTRAPPING and state >= KVPoll.WaitingForInput:
                self.bootstrapping.remove(request)
                request.state = RequestState.WAITING
                self.waiting.append(request)
            elif request.state is RequestState.SENDING and state is KVPoll.Success:
                self._early_outputs.append(self._complete(request))

    def _complete(self, request: Request) -> RequestOutput:
        output = _outgoing(request).output
        assert output is not None
        self.hand_over.count_success(request.prompt_length, _outgoing(request).started)
        self._end(request, Finish("length"))
        return output

    # Pages going out

    def _on_admitted(self, request: Request) -> None:
        outgoing, residence = _outgoing(request), request.residence
        assert residence is not None
        outgoing.pages_sent = outgoing.sender.skip_pages()
        outgoing.sender.init(self.memory.pages_for(request.prompt_length) - outgoing.pages_sent, residence.row)
        outgoing.started = time.monotonic()
        # What the cache had can travel while the rest is computed.
        self._on_chunk(request, residence.shared_pages * self.memory.page_size)

    def _on_chunk(self, request: Request, end: int) -> None:
        # A page that is not full yet goes with the next chunk: each page is sent once.
        self._send(request, end // self.memory.page_size)

    def _send(self, request: Request, end_page: int, *, note: Note | None = None) -> None:
        """Pages up to end_page that were not sent yet; with a note it is the last send."""
        outgoing, residence = _outgoing(request), request.residence
        assert residence is not None
        pages = np.asarray(residence.pages[outgoing.pages_sent : end_page], dtype=np.int64)
        outgoing.pages_sent = max(outgoing.pages_sent, end_page)
        if note is not None:
            outgoing.sender.send(pages, last=True, note=encode_note(note))
        elif len(pages):
            outgoing.sender.send(pages)

    def _publish_prompt(self, request: Request, *, valid: bool) -> None:
        residence = request.residence
        assert residence is not None
        # Sharing would swap pages for equal ones that another request has put there meanwhile; pages under way must
        # stay. They are shared when the request ends.
        if self.memory.cache.match_length(request_keys(request, self.memory)) > residence.shared_pages:
            valid = False
        super()._publish_prompt(request, valid=valid)

    def _commit(self, request: Request, result: ItemResult, sampled: bool) -> RequestOutput | None:
        if not result.valid:
            return super()._commit(request, result, sampled)
        assert request.residence is not None and request.message.bootstrap is not None
        logprobs = None
        if sampled:
            request.output_ids.append(result.token)
            self.generated_tokens_total += 1
            if result.logprob is not None:
                logprobs = TokenLogprobs([result.token], [result.logprob], [result.top])
        cached = request.cached_tokens
        note = Note(logprobs, request.prompt_logprobs)
        token = result.token if sampled else -1
        room = request.message.bootstrap.room
        self.hand_over.rows.write(request.residence.row, Metadata(room, token, cached))
        _outgoing(request).output = RequestOutput(
            request.rid, list(request.output_ids), Finish("length"), logprobs, note.prompt_logprobs, cached
        )
        self.decoding.remove(request)
        request.state = RequestState.SENDING
        self.sending.append(request)
        self._send(request, self.memory.pages_for(request.prompt_length), note=note)
        return None

    # Requests going

    def _leave(self, request: Request, finish: Finish, keys: list[PageKey] | None) -> None:
        sender = _outgoing(request).sender
        if finish.reason == "abort":
            sender.abort(finish.message)
        sender.clear()
        request.transfer = None
        if request.state is RequestState.BOOTSTRAPPING:
            self.bootstrapping.remove(request)
        elif request.state is RequestState.SENDING:
            assert request.residence is not None
            self.sending.remove(request)
            self.memory.release(request.residence, keys)
            request.residence = None
        else:
            super()._leave(request, finish, keys)


def _outgoing(request: Request) -> Outgoing:
    assert isinstance(request.transfer, Outgoing)
    return request.transfer
