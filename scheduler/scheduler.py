"""One rank's scheduler: which rows run in the next step, and what their results mean.

`next_batch` decides and accounts for what it launches; `process` takes the results of a launched batch, in launch
order, any number of `next_batch` calls later (the overlap loop is one step ahead). Nothing here touches the device
except through `KVMemory`.

Prefill and decode servers run this with a few queues around it: see `prefill_scheduler` and `decode_scheduler`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from scheduler.admission import OutputReserve, ordered, request_keys, usable_prefix
from scheduler.batch import Batch, BatchItem, ItemResult
from scheduler.memory import KVMemory
from scheduler.messages import Finish, GenerateRequest, LoadReport, RequestOutput, TokenLogprobs
from scheduler.radix_cache import PageKey, page_keys
from scheduler.request import Request, RequestState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerLimits:
    """chunk_tokens: prompt tokens a step, None for unbounded (prompts are then not cut). prefill_tokens: prompt tokens
    admitted a step. queued: waiting requests beyond which new ones are refused, None for no bound."""

    context_length: int
    vocab_size: int
    chunk_tokens: int | None
    prefill_tokens: int
    queued: int | None
    policy: str
    conservativeness: float

    def most_rows(self, decoding: int) -> int:
        """Token rows that no step exceeds: one of each of so many decoding requests, and the prompt tokens of a step.

        A decode server has prompt tokens too, of requests that it has retracted.
        """
        if self.chunk_tokens is not None:
            return decoding + min(self.prefill_tokens, self.chunk_tokens)
        # A prompt longer than a step's tokens has a step of its own.
        return decoding + max(self.prefill_tokens, self.context_length)


class Scheduler:
    """Queues, memory accounting and results of one rank.

    What it decides follows from its requests, the order of its calls and `memory` alone, so that the ranks of a group,
    which make the same calls, decide alike.
    """

    def __init__(self, memory: KVMemory, limits: SchedulerLimits, eos_token_ids: tuple[int, ...]) -> None:
        self.memory = memory
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.requests: dict[str, Request] = {}  # live ones, by id
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []  # admitted, with prompt tokens left to launch; at most one is cut short
        self.decoding: list[Request] = []
        self.reserve = OutputReserve(limits.conservativeness)
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.generated_tokens_total = 0
        self.retractions_total = 0
        self.batches_launched = 0
        self.batches_processed = 0
        # First uncached page of every prompt being computed, and whose it is: a request that needs an equal page waits
        # and then reads it from the cache, so that n samples of one prompt compute it once.
        self._pages_under_way: dict[tuple[int, PageKey], Request] = {}
        self._retracted_now = False
        self._early_outputs: list[RequestOutput] = []
        self._seeds: list[tuple[int, int]] = []  # of the next batch
        self._stalled: set[str] = set()  # decoding requests that found no page to grow into in the last step

    # Requests coming and going

    def add(self, message: GenerateRequest) -> None:
        """Queue a request; one that cannot be served is answered with an abort in the next `take_early_outputs`."""
        refusal = self._refusal(message)
        if refusal is not None:
            self._refuse(message, refusal)
            return
        if message.rid in self.requests:
            # Answering under this id would end the other request's stream.
            logger.error("request id %s is already live; the second request is dropped", message.rid)
            return
        request = Request(message)
        if message.prompt_logprobs_start >= 0:
            request.prompt_logprobs = TokenLogprobs([], [], [])
        self.requests[message.rid] = request
        self._enqueue(request)

    def _refuse(self, message: GenerateRequest, refusal: Finish) -> None:
        self._early_outputs.append(RequestOutput(message.rid, [], refusal))

    def _enqueue(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, rid: str) -> None:
        """End a request wherever it is; its memory is free at once. Unknown ids are a no-op."""
        request = self.requests.get(rid)
        if request is not None:
            self._early_outputs.append(self._end(request, Finish("abort", message="aborted", status=499)))

    def abort_all(self) -> None:
        for rid in list(self.requests):
            self.abort(rid)

    def take_early_outputs(self) -> list[RequestOutput]:
        """Outputs that did not come from a batch: refusals and aborts."""
        outputs, self._early_outputs = self._early_outputs, []
        return outputs

    @property
    def is_idle(self) -> bool:
        return not self.requests

    @property
    def num_queued(self) -> int:
        """Requests that own no KV memory yet."""
        return len(self.waiting)

    def check_memory(self) -> None:
        """MemoryLeak unless every page and row is accounted for."""
        self.memory.check([r.residence for r in self.requests.values() if r.residence is not None])

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests are live."""
        if not self.is_idle:
            return False
        self.memory.flush_cache()
        return True

    def load(self, rank: int) -> LoadReport:
        memory = self.memory
        evictable = memory.cache.num_evictable * memory.page_size
        free = memory.allocator.num_free * memory.page_size
        prompt = self.prompt_tokens_total
        return LoadReport(
            rank=rank,
            running_requests=len(self.prefilling) + len(self.decoding),
            waiting_requests=len(self.waiting),
            used_tokens=memory.total_tokens - free - evictable,
            evictable_tokens=evictable,
            total_tokens=memory.total_tokens,
            waiting_tokens=sum(request.num_tokens for request in self.waiting),
            prompt_tokens_total=prompt,
            cached_tokens_total=self.cached_tokens_total,
            generated_tokens_total=self.generated_tokens_total,
            retractions_total=self.retractions_total,
            cache_hit_rate=self.cached_tokens_total / prompt if prompt else 0.0,
        )

    # Choosing the next step

    def next_batch(self) -> Batch | None:
        """All decoding requests that still want tokens, and prompt tokens up to the step's budget; None if no rows."""
        self._retracted_now = False
        self._before_step()
        items = self._decode_items()
        items += self._prefill_items()
        if not items:
            if self.is_idle:
                self.reserve.when_idle()
            return None
        seeds, self._seeds = self._seeds, []
        self.batches_launched += 1
        return Batch(items, seeds)

    def _before_step(self) -> None:
        """What else moves between steps."""

    def _decode_items(self) -> list[BatchItem]:
        wanting = [request for request in self.decoding if request.launched < request.max_new_tokens]
        wanting = self._make_room(wanting)
        items = []
        for request in wanting:
            residence = request.residence
            assert residence is not None
            start = residence.computed
            if start == len(residence.pages) * self.memory.page_size:
                self.memory.grow(residence)
            residence.computed = start + 1
            request.launched += 1
            items.append(
                BatchItem(request, request.epoch, start, start + 1, True, True, True, output_index=request.launched - 1)
            )
        if items:
            self.reserve.after_decode_step()
        return items

    def _make_room(self, wanting: list[Request]) -> list[Request]:
        """Retract until each of the rest can have the page it needs; the rest."""
        page_size = self.memory.page_size

        def growing() -> list[Request]:
            return [r for r in wanting if r.residence and r.residence.computed == len(r.residence.pages) * page_size]

        while len(growing()) > self.memory.available_pages:
            victim = self._victim()
            if victim is None:
                break
            self._retract(victim)
            wanting = [request for request in wanting if request is not victim]
            self._retracted_now = True
        if self._retracted_now:
            self.reserve.after_retraction(self.decoding)
        # Where transfers hold pages, even the last one may find none left; it waits for a transfer to end.
        self._stalled = {request.rid for request in growing()[self.memory.available_pages :]}
        return [request for request in wanting if request.rid not in self._stalled]

    def _victim(self) -> Request | None:
        """The resident with the least output, of those the one with the longest prompt; None when only one is left."""
        residents = self.prefilling + self.decoding
        if len(residents) < 2:
            return None
        return min(residents, key=lambda r: (r.launched, -r.prompt_length))

    def _retract(self, request: Request) -> None:
        """Back to the head of the queue with its output so far, to be computed again; a result under way is dropped."""
        self._leave_batch(request)
        assert request.residence is not None
        self.memory.release(request.residence)
        request.residence = None
        request.state = RequestState.WAITING
        request.epoch += 1
        request.launched = len(request.output_ids)
        request.page_keys = None
        if request.wants_prompt_logprobs:
            request.prompt_logprobs = TokenLogprobs([], [], [])
        self.waiting.insert(0, request)
        self.retractions_total += 1
        logger.info(
            "KV memory is full: request %s is retracted with %d output tokens and will continue later",
            request.rid,
            len(request.output_ids),
        )

    def _prefill_items(self) -> list[BatchItem]:
        budget = self.limits.prefill_tokens
        if self.limits.chunk_tokens is not None:
            budget = min(budget, self.limits.chunk_tokens)
        items: list[BatchItem] = []
        for request in list(self.prefilling):
            if budget <= 0:
                return items
            item = self._launch_prefill(request, budget)
            budget -= item.num_tokens
            items.append(item)
        if self._retracted_now:
            return items  # what was just freed is for those that kept running
        for request in ordered(list(self.waiting), self.limits.policy, self.memory):
            if budget <= 0 or self.memory.num_free_rows == 0:
                break
            keys = usable_prefix(request, self.memory)
            hit = self.memory.cache.match_length(keys)
            if self._is_under_way(request, hit):
                continue
            to_compute = request.num_tokens - hit * self.memory.page_size
            if self.limits.chunk_tokens is None and to_compute > budget and items:
                break
            if not self._fits(request, to_compute):
                break
            residence = self.memory.admit(request, keys)
            if residence is None:
                break
            self.waiting.remove(request)
            request.residence = residence
            request.state = RequestState.PREFILLING
            self.prefilling.append(request)
            self._count_admission(request)
            self._mark_under_way(request)
            self._on_admitted(request)
            item = self._launch_prefill(request, budget if self.limits.chunk_tokens is not None else to_compute)
            budget -= item.num_tokens
            items.append(item)
        return items

    def _on_admitted(self, request: Request) -> None:
        """The request has its memory; `residence.shared_pages` of it hold computed KV already."""

    def _fits(self, request: Request, to_compute: int) -> bool:
        residents = self.prefilling + self.decoding
        if not residents:
            return True  # with nothing else resident the whole pool is its own
        free = self.memory.available_pages * self.memory.page_size
        return to_compute + self.memory.page_size + self.reserve.held_back([*residents, request]) <= free

    def _launch_prefill(self, request: Request, budget: int) -> BatchItem:
        residence = request.residence
        assert residence is not None
        start, total = residence.computed, request.num_tokens
        end = min(total, start + budget)
        residence.computed = end
        completes = end == total
        samples = completes and request.launched < request.max_new_tokens
        if completes:
            self.prefilling.remove(request)
            self.decoding.append(request)
            request.state = RequestState.DECODING
        if samples:
            request.launched += 1
        index = request.launched - 1
        return BatchItem(request, request.epoch, start, end, False, completes, samples, output_index=index)

    def _count_admission(self, request: Request) -> None:
        if request.cached_tokens >= 0:
            return  # admitted before, then retracted
        assert request.residence is not None
        request.cached_tokens = request.residence.computed
        self.prompt_tokens_total += request.prompt_length
        self.cached_tokens_total += request.cached_tokens

    def _under_way_key(self, request: Request, first_page: int) -> tuple[int, PageKey] | None:
        keys = request_keys(request, self.memory)
        if not self.memory.use_prefix_cache or first_page >= len(keys) or request.wants_prompt_logprobs:
            return None
        return first_page, keys[first_page]

    def _is_under_way(self, request: Request, hit: int) -> bool:
        return self._under_way_key(request, hit) in self._pages_under_way

    def _mark_under_way(self, request: Request) -> None:
        assert request.residence is not None
        key = self._under_way_key(request, request.residence.shared_pages)
        if key is not None:
            self._pages_under_way[key] = request
            request.page_under_way = key

    def _unmark_under_way(self, request: Request) -> None:
        if request.page_under_way is not None:
            del self._pages_under_way[request.page_under_way]
            request.page_under_way = None

    # Results

    def process(self, batch: Batch, results: list[ItemResult]) -> list[RequestOutput]:
        """Commit a launched batch's results; returns what the requests' clients are to hear."""
        self.batches_processed += 1
        outputs = []
        for item, result in zip(batch.items, results, strict=True):
            request = item.request
            if request.finish is not None or request.epoch != item.epoch:
                continue  # ended or retracted while this was under way
            if not item.is_decode:
                self._add_prompt_logprobs(request, item, result)
                if not item.completes:
                    self._on_chunk(request, item.end)
                    continue
                self._publish_prompt(request, valid=result.valid)
            output = self._commit(request, result, item.samples)
            if output is not None:
                outputs.append(output)
        return outputs

    def _on_chunk(self, request: Request, end: int) -> None:
        """The KV of the prompt's first `end` tokens is computed, and more of it is to come."""

    def _publish_prompt(self, request: Request, *, valid: bool) -> None:
        self._unmark_under_way(request)
        if valid:
            assert request.residence is not None
            self.memory.share(request.residence, request_keys(request, self.memory))

    def _commit(self, request: Request, result: ItemResult, sampled: bool) -> RequestOutput | None:
        """Add what was sampled to the request and end it if that was its last token; None: nothing to tell yet."""
        if not result.valid:
            message = "the model produced NaN or infinite logits for this request"
            return self._end(request, Finish("abort", message=message, status=500))
        tokens: list[int] = []
        logprobs = None
        finish = None
        if sampled:
            tokens = [result.token]
            request.output_ids.append(result.token)
            self.generated_tokens_total += 1
            if result.logprob is not None:
                logprobs = TokenLogprobs(tokens, [result.logprob], [result.top])
            finish = self._finish_of(request, result.token)
        elif request.max_new_tokens == 0:
            finish = Finish("length")
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        output = RequestOutput(request.rid, tokens, finish, logprobs, prompt_logprobs, request.cached_tokens)
        if finish is not None:
            self._end(request, finish)
        return output

    def _finish_of(self, request: Request, token: int) -> Finish | None:
        params = request.message.sampling
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            return Finish("stop", matched=token)
        if len(request.output_ids) >= params.max_new_tokens:
            return Finish("length")
        return None

    def _add_prompt_logprobs(self, request: Request, item: BatchItem, result: ItemResult) -> None:
        gathered = request.prompt_logprobs
        if gathered is None:
            return
        ids = request.message.input_ids
        start = request.message.prompt_logprobs_start
        if not gathered.token_ids and start == 0:
            gathered.token_ids.append(ids[0])
            gathered.logprobs.append(None)
            gathered.top.append([])
        for position, (logprob, top) in zip(item.prompt_logprob_rows(), result.prompt_logprobs, strict=True):
            if position + 1 >= start:
                gathered.token_ids.append(ids[position + 1])
                gathered.logprobs.append(logprob)
                gathered.top.append(top)

    def _end(self, request: Request, finish: Finish) -> RequestOutput:
        """The one way out for a live request: gives back all it owns. What an abort leaves is not kept in the cache."""
        keys = None
        if finish.reason != "abort" and not request.kv_is_fake:
            # The last token was sampled; nobody needed its KV.
            computed = request.num_tokens - 1 if request.output_ids else request.num_tokens
            keys = page_keys(request.tokens(), self.memory.page_size, limit=computed)
        self._leave(request, finish, keys)
        request.state = RequestState.FINISHED
        request.finish = finish
        del self.requests[request.rid]
        return RequestOutput(request.rid, [], finish)

    def _leave(self, request: Request, finish: Finish, keys: list[PageKey] | None) -> None:
        """Take an ending request out of its queue and its memory back; `keys` as in `KVMemory.release`."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            return
        assert request.residence is not None
        self._leave_batch(request)
        self.memory.release(request.residence, keys)
        request.residence = None

    def _leave_batch(self, request: Request) -> None:
        self._unmark_under_way(request)
        if request.state is RequestState.PREFILLING:
            self.prefilling.remove(request)
        else:
            self.decoding.remove(request)

    def _refusal(self, message: GenerateRequest) -> Finish | None:
        limits = self.limits
        prompt, output = len(message.input_ids), message.sampling.max_new_tokens
        if limits.queued is not None and self.num_queued >= limits.queued:
            text = f"the request queue is full ({limits.queued} waiting, --max-queued-requests); try again later"
            return Finish("abort", message=text, status=503)
        if prompt == 0:
            return Finish("abort", message="the prompt has no tokens", status=400)
        if not all(0 <= token < limits.vocab_size for token in message.input_ids):
            text = f"the prompt holds a token id outside the vocabulary 0..{limits.vocab_size - 1}"
            return Finish("abort", message=text, status=400)
        if prompt + output > limits.context_length:
            text = f"{prompt} prompt tokens + {output} new tokens exceed the limit of {limits.context_length} tokens"
            return Finish("abort", message=text, status=400)
        return None
