"""Messages between the API process and the ranks: msgspec structs, sent as msgpack over ZeroMQ."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to choose tokens and when to stop; validated by the API process.

    max_new_tokens: at least 0; 0 only scores the prompt.
    temperature: 0 means greedy. top_k: -1 means all. top_p in (0, 1]. min_p in [0, 1].
    seed: always set (drawn by the API process when the client gave none), so that every rank and every topology
        samples the same token whatever else is in the batch. 0 <= seed < 2**63.
    stop_token_ids: end the request, beside the model's end-of-sequence ids. ignore_eos: the model's do not; explicit
        stop_token_ids still do.
    min_new_tokens: neither end-of-sequence nor stop ids are sampled before so many tokens.
    frequency_penalty, presence_penalty, repetition_penalty: see `layers.penalties.RowPenalties`. logit_bias: (token id,
        what is added to its logit) pairs, each id once.
    """

    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or a bias change the logits that tokens are chosen from."""
        penalty = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        return bool(penalty or self.logit_bias)


class Bootstrap(msgspec.Struct, frozen=True, array_like=True):
    """Where the hand-over of one sample from prefill to decode takes place.

    host, port: the prefill server's bootstrap server. room: 1 to 2**63 - 1, one a sample, the same on both sides.
    prefill_dp_rank: the prefill server's data-parallel rank; -1 to look it up.
    """

    host: str
    port: int
    room: int
    prefill_dp_rank: int = -1


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """One sample of one prompt; n > 1 is n requests.

    rid: unique among live requests (the API process makes it so). input_ids: at least one id, all in the vocabulary.
    logprobs: return the chosen token's log probability; top_logprobs: and so many of the likeliest.
    prompt_logprobs_start: first prompt position whose log probability is wanted; -1 for none. Position 0 has none.
    bootstrap: set exactly on prefill and decode servers.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_start: int = -1
    bootstrap: Bootstrap | None = None


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End the request `rid`, or every request when `rid` is empty and `all` is set; unknown ids are a no-op."""

    rid: str
    all: bool = False


class ControlRequest(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """kind: "ping" | "flush_cache" | "state" | "shutdown"; answered by a ControlReply with the same id.

    "shutdown" ends the rank after the reply, whatever is running: the API process drains beforehand.
    """

    id: int
    kind: str


Inbound = GenerateRequest | AbortRequest | ControlRequest


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended.

    reason: "stop" (matched = the token id), "length", or "abort" (message, and the HTTP status it deserves).
    """

    reason: str
    matched: int = -1
    message: str = ""
    status: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One entry a token: its id, its log probability (None for prompt position 0) and its likeliest alternatives."""

    token_ids: list[int]
    logprobs: list[float | None]
    top: list[list[tuple[int, float]]]


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request. `token_ids` includes a matched stop id.

    prompt_logprobs comes once, with the first output. cached_tokens: prompt tokens taken from the prefix cache.
    """

    rid: str
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """Gauges and running totals of one rank.

    bootstrapping_requests, sending_requests: of a prefill server, before admission and after the prompt is computed.
    connecting_requests, receiving_requests: of a decode server, before memory was found and while KV is under way.
    transfer_rooms: of either, rooms that have not been forgotten, also those whose request has not come.
    transfer_seconds_total: from admission (prefill) or from the offer of pages (decode) until everything was there.
    """

    rank: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    used_tokens: int = 0
    evictable_tokens: int = 0
    total_tokens: int = 0
    waiting_tokens: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    retractions_total: int = 0
    generation_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    bootstrapping_requests: int = 0
    sending_requests: int = 0
    connecting_requests: int = 0
    receiving_requests: int = 0
    transfer_rooms: int = 0
    transfers_total: int = 0
    transfer_failures_total: int = 0
    transferred_tokens_total: int = 0
    transfer_seconds_total: float = 0.0


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One message a step with everything it produced; `load` is attached when it changed enough to be worth sending."""

    rank: int
    outputs: list[RequestOutput]
    load: LoadReport | None = None


RankState: TypeAlias = dict[str, str | int | float | bool | None]


class ControlReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """Answer to the ControlRequest `id`. state: filled for "state", else empty."""

    id: int
    rank: int
    ok: bool
    message: str = ""
    state: RankState = {}


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Sent once when the rank can serve.

    max_total_tokens: KV slots to give out. context_length: longest prompt plus output of one request.
    eos_token_ids: the model's end-of-sequence ids. dtype: "bfloat16" and so on. load_seconds: time spent on weights.
    expert_dtype: in which routed experts are held, "float8_e4m3fn" where they stay so; None where there are none.
    hand_over: what a server of the other role must have too, by name; empty where nothing is handed over.
    """

    rank: int
    max_total_tokens: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    load_seconds: float
    expert_dtype: str | None = None
    hand_over: dict[str, str] = {}


Outbound = StepOutput | ControlReply | RankReady

# Exit status of a rank that cannot go on because another rank of its engine is gone.
STATUS_PEER_LOST = 3
# Exit status of a rank one of whose steps has taken longer than --watchdog-timeout.
STATUS_HUNG = 4
# HTTP status of a request whose prefill and decode servers do not fit together as they were started. Routers try what
# failed with 500 or 502 to 504 again; this one only another pair of servers may answer differently.
STATUS_UNFIT = 501

_encoder = msgspec.msgpack.Encoder()
_inbound_decoder = msgspec.msgpack.Decoder(Inbound)
_outbound_decoder = msgspec.msgpack.Decoder(Outbound)


def encode(message: Inbound | Outbound) -> bytes:
    return _encoder.encode(message)


def decode_inbound(data: bytes) -> Inbound:
    """msgspec.ValidationError on anything that is not an Inbound message."""
    return _inbound_decoder.decode(data)


def decode_outbound(data: bytes) -> Outbound:
    """msgspec.ValidationError on anything that is not an Outbound message."""
    return _outbound_decoder.decode(data)
