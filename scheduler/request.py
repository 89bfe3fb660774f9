"""A request's life: waiting -> prefilling -> decoding -> finished, or back to waiting by retraction.

On a prefill server: bootstrapping -> waiting -> prefilling -> sending -> finished. On a decode server: connecting ->
receiving -> decoding -> finished, and after retraction waiting -> prefilling -> decoding.

What a request owns depends on its state. From prefilling or receiving on it owns a `Residence`, which
`scheduler.memory.KVMemory` makes and takes back; nothing else does. Where a hand-over is under way it owns an
`Outgoing` or `Incoming`, made and ended by the scheduler of that role. A finished request owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from disagg.base import KVReceiver, KVSender
from scheduler.messages import Finish, GenerateRequest, RequestOutput, TokenLogprobs
from scheduler.radix_cache import PageKey, RadixNode


class RequestState(Enum):
    BOOTSTRAPPING = "bootstrapping"  # prefill server: the decode side has not sent its indices yet
    CONNECTING = "connecting"  # decode server: the prefill side is not known, or memory is short
    WAITING = "waiting"
    PREFILLING = "prefilling"
    SENDING = "sending"  # prefill server: computed, the decode side has not confirmed all of it
    RECEIVING = "receiving"  # decode server: its KV is under way
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass
class Residence:
    """Memory of one admitted request.

    row: its row of the request table. pages: its KV pages in position order, the first `shared_pages` of them owned by
    the prefix cache and kept there by the lock on `node`, the others its own.
    computed: positions whose KV has been launched.
    """

    row: int
    pages: list[int]
    shared_pages: int
    node: RadixNode
    computed: int


@dataclass
class Outgoing:
    """Prefill side of a hand-over. pages_sent: of the prompt, those that the decode side had already too.

    started: when it was admitted. output: for the client once the decode side has everything.
    """

    sender: KVSender
    pages_sent: int = 0
    started: float = 0.0
    output: RequestOutput | None = None


@dataclass
class Incoming:
    """Decode side of a hand-over.

    fence: number of launched batches that must have been processed before the pages may be written from outside; None
    once the pages are published. started: when they were.
    """

    receiver: KVReceiver
    fence: int | None = None
    started: float = 0.0


@dataclass
class Request:
    """One sample being generated.

    output_ids: tokens whose results were processed. launched: output tokens whose forward pass was launched, which runs
    ahead of `output_ids` by at most one in the overlap loop. epoch: rises on retraction, so that a result launched
    before it is recognised and dropped.
    cached_tokens: prompt tokens found in the prefix cache at the first admission.
    """

    message: GenerateRequest
    state: RequestState = RequestState.WAITING
    residence: Residence | None = None
    transfer: Outgoing | Incoming | None = None
    output_ids: list[int] = field(default_factory=list)
    launched: int = 0
    epoch: int = 0
    cached_tokens: int = -1
    finish: Finish | None = None
    # Its KV was never computed and must not be given to other requests.
    kv_is_fake: bool = False
    # Prompt log probabilities gathered over the chunks; None once sent or when not wanted.
    prompt_logprobs: TokenLogprobs | None = None
    # Keys of the tokens to prefill, made once per wait; retraction lengthens the tokens and clears them.
    page_keys: list[PageKey] | None = None
    # The scheduler's note that others wait for this prompt's first uncached page.
    page_under_way: tuple[int, PageKey] | None = None

    @property
    def rid(self) -> str:
        return self.message.rid

    @property
    def prompt_length(self) -> int:
        return len(self.message.input_ids)

    @property
    def max_new_tokens(self) -> int:
        return self.message.sampling.max_new_tokens

    def tokens(self) -> list[int]:
        """Prompt and processed output."""
        return self.message.input_ids + self.output_ids if self.output_ids else self.message.input_ids

    @property
    def num_tokens(self) -> int:
        return len(self.message.input_ids) + len(self.output_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None

    def first_logit_row(self) -> int:
        """First position whose logits the prompt log probabilities need: the one before the first wanted token."""
        return max(0, self.message.prompt_logprobs_start - 1)
