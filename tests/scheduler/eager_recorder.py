"""A recorder for CPUs: what surrounds recordings in an engine is the same as with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable


class EagerRecorder:
    """Replays a pass by running it again on its fixed tensors. replays: how many there were."""

    def __init__(self) -> None:
        self.replays = 0

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replays += 1
            work()

        return replay
