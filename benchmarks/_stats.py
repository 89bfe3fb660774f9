"""From timestamps of tokens to the figures that the benchmarks report. Times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class RequestRecord:
    """What happened to one request.

    start: when it was due. token_times: arrival of each piece of output, in order; a piece may hold several tokens.
    output_tokens: as counted by the server, or the number of pieces where it does not say.
    error: None for a complete answer; else a short kind such as "HTTP 503", with `error_message` for people.
    """

    index: int
    start: float
    input_tokens: int = 0
    output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    end: float = 0.0
    error: str | None = None
    error_message: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.start

    @property
    def latency(self) -> float:
        """End-to-end time, until the last byte of the answer."""
        return self.end - self.start

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies as a client sees them: times between consecutive pieces of output."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def time_per_output_token(self) -> float | None:
        """Mean time a token after the first; None for answers of one token."""
        if self.output_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)


def summarize_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles (linear interpolation) in milliseconds of values in seconds; None without values."""
    if not values_s:
        return None
    values_ms = np.asarray(values_s) * 1000.0
    p50, p90, p99 = np.percentile(values_ms, (50, 90, 99))
    summary = {"mean": values_ms.mean(), "p50": p50, "p90": p90, "p99": p99, "max": values_ms.max()}
    return {name: round(float(value), 3) for name, value in summary.items()}


def decode_rate(records: Sequence[RequestRecord]) -> float | None:
    """Tokens a second while every request in flight already had its first token, that is, while nobody prefills.

    Of a batch that starts together this is the rate between the last first token and the last token. None where
    requests always wait for a first token, or give one token only.
    """
    events: list[tuple[float, int, float]] = []
    # At equal times a start comes last: a request that begins where another ends does not interrupt its last token.
    for record in records:
        if not record.token_times:
            continue
        tokens_per_piece = record.output_tokens / len(record.token_times)
        events.append((record.start, 3, 0.0))
        events.append((record.token_times[0], 1, 0.0))
        events.extend((time, 0, tokens_per_piece) for time in record.token_times[1:])
        events.append((record.token_times[-1], 2, 0.0))
    events.sort()
    waiting = decoding = 0
    seconds = tokens = previous = 0.0
    for time, kind, piece in events:
        if waiting == 0 and decoding > 0:
            seconds += time - previous
            tokens += piece
        previous = time
        if kind == 1:
            waiting -= 1
            decoding += 1
        elif kind == 2:
            decoding -= 1
        elif kind == 3:
            waiting += 1
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def count_errors(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """kind -> {"count", "example"} of the records that failed."""
    errors: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.error is not None:
            entry = errors.setdefault(record.error, {"count": 0, "example": record.error_message})
            entry["count"] += 1
    return errors


def summarize(records: Sequence[RequestRecord], not_started: int = 0) -> dict[str, Any]:
    """The figures of one run. Rates and latencies are of complete answers; failed requests count in `errors` only.

    duration_s runs from the first start to the last end of any request, failed ones included.
    """
    complete = [record for record in records if record.error is None and record.token_times]
    duration = max(r.end for r in records) - min(r.start for r in records) if records else 0.0
    input_tokens = sum(record.input_tokens for record in complete)
    output_tokens = sum(record.output_tokens for record in complete)

    def rate(amount: float) -> float:
        return round(amount / duration, 3) if duration > 0 else 0.0

    decode = decode_rate(complete)
    per_token = [value for record in complete if (value := record.time_per_output_token) is not None]
    return {
        "completed": len(complete),
        "failed": len(records) - len(complete),
        "not_started": not_started,
        "errors": count_errors(records),
        "duration_s": round(duration, 4),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": rate(len(complete)),
        "input_tokens_per_s": rate(input_tokens),
        "output_tokens_per_s": rate(output_tokens),
        "decode_tokens_per_s": None if decode is None else round(decode, 3),
        "ttft_ms": summarize_ms([record.ttft for record in complete]),
        "itl_ms": summarize_ms([gap for record in complete for gap in record.gaps]),
        "tpot_ms": summarize_ms(per_token),
        "e2e_ms": summarize_ms([record.latency for record in complete]),
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as a small table for a terminal."""
    lines = [
        f"requests          {summary['completed']} completed, {summary['failed']} failed, "
        f"{summary['not_started']} not started",
        f"duration          {summary['duration_s']:.2f} s",
        f"tokens            {summary['input_tokens']} in, {summary['output_tokens']} out",
        f"output tokens/s   {summary['output_tokens_per_s']:.1f}",
        f"input tokens/s    {summary['input_tokens_per_s']:.1f}",
    ]
    if summary["decode_tokens_per_s"] is not None:
        lines.append(f"decode tokens/s   {summary['decode_tokens_per_s']:.1f} (while no request waits for its first)")
    names = {"ttft_ms": "TTFT", "itl_ms": "inter-token", "tpot_ms": "per token", "e2e_ms": "end to end"}
    lines.append(f"{'ms':<17} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9} {'max':>9}")
    for key, name in names.items():
        if (values := summary[key]) is not None:
            cells = " ".join(f"{values[column]:9.1f}" for column in ("mean", "p50", "p90", "p99", "max"))
            lines.append(f"{name:<17} {cells}")
    for kind, error in summary["errors"].items():
        lines.append(f"error             {error['count']} x {kind}: {error['example']}")
    return "\n".join(lines)
