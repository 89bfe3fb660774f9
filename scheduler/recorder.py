"""Recording a pass, so that it runs again without the Python that led to it.

What a recording reads must be where it was when it was recorded: tensors that are overwritten, never replaced. Values
that only Python knows stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Recorder(Protocol):
    """Ranks whose passes contain collectives make the same calls in the same order."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run `work` as it will be recorded: kernels compile and libraries set themselves up outside of recordings."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What runs `work` again on the current contents of its tensors. `work` itself need not take effect here."""


class CudaRecorder:
    """Recordings are CUDA graphs, of one memory pool: what one computes is gone when another of them runs.

    `work` must not wait for the device, depend on a tensor's values, or copy from memory that is not pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, work: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize(self._stream.device)
        return graph.replay
