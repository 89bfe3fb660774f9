"""One PNG of a run. matplotlib is optional: `pip install -e '.[bench]'`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._stats import RequestRecord


def missing_dependency() -> str | None:
    """What to do about a missing matplotlib; None where it is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib, which is not installed: pip install -c constraints.txt -e '.[bench]'"
    return None


def plot_run(records: Sequence[RequestRecord], summary: dict[str, Any], title: str, path: Path) -> None:
    """Distribution of the three latencies, and output tokens a second with the requests in flight over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    complete = [record for record in records if record.error is None and record.token_times]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"{title}: {summary['output_tokens_per_s']:.0f} output tokens/s, {summary['completed']} requests")
    panels = [
        (axes[0, 0], "Time to first token", [record.ttft for record in complete]),
        (axes[0, 1], "Inter-token latency", [gap for record in complete for gap in record.gaps]),
        (axes[1, 0], "End-to-end latency", [record.latency for record in complete]),
    ]
    for axis, name, values in panels:
        axis.set_title(name)
        axis.set_xlabel("ms")
        axis.set_ylabel("share of requests" if name != "Inter-token latency" else "share of gaps")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        if values:
            ordered_ms = np.sort(np.asarray(values)) * 1000.0
            axis.step(ordered_ms, np.arange(1, len(ordered_ms) + 1) / len(ordered_ms), where="post")
            axis.set_xlim(left=0)
            for percent, style in ((50, "--"), (99, ":")):
                value = float(np.percentile(ordered_ms, percent))
                axis.axvline(value, linestyle=style, color="0.4", label=f"p{percent} {value:.1f} ms")
            axis.legend(loc="lower right")
    _plot_timeline(axes[1, 1], complete)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_timeline(axis: Any, complete: Sequence[RequestRecord]) -> None:
    axis.set_title("Throughput")
    axis.set_xlabel("seconds since the first request")
    axis.set_ylabel("output tokens/s")
    axis.grid(alpha=0.3)
    if not complete:
        return
    origin = min(record.start for record in complete)
    length = max(max(record.end for record in complete) - origin, 1e-3)
    bins = int(min(max(length / 0.5, 10), 120))
    times = np.concatenate([np.asarray(record.token_times) for record in complete]) - origin
    weights = np.concatenate([np.full(len(r.token_times), r.output_tokens / len(r.token_times)) for r in complete])
    counts, edges = np.histogram(times, bins=bins, range=(0.0, length), weights=weights)
    axis.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.5)
    axis.set_ylim(bottom=0)
    flight = axis.twinx()
    centres = (edges[:-1] + edges[1:]) / 2
    starts = np.asarray([record.start - origin for record in complete])
    ends = np.asarray([record.end - origin for record in complete])
    in_flight = [int(((starts <= centre) & (ends > centre)).sum()) for centre in centres]
    flight.plot(centres, in_flight, color="tab:orange", label="requests in flight")
    flight.set_ylabel("requests in flight")
    flight.set_ylim(0, max(in_flight, default=1) * 1.25 + 1)
    flight.legend(loc="upper right")
