"""Decode passes on the CPU, recorded the first time there is a batch of their size and replayed from then on.

Tapes cost little to record and need no padding, so every number of requests has its own. Results are those of the same
kernels with the same numbers, to the bit.

Shape letters: B requests, V vocabulary.
"""

from __future__ import annotations

import logging

import torch

from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kernels.cpu.tape import Tape, Workspace
from scheduler.decode_inputs import DecodeInputs
from scheduler.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class DecodeTapes:
    """Of `runner`'s model, for batches of up to `max_batch` requests.

    When a pass turns out not to be recordable, it takes itself out of the runner.
    """

    def __init__(self, runner: ModelRunner, max_batch: int) -> None:
        self._runner, self._max_batch = runner, max_batch
        self._inputs = DecodeInputs(runner.memory.table, runner.kv_cache, runner.attention, max_batch)
        self._workspace = Workspace()
        # The batches' plans own tensors that tapes read.
        self._tapes: dict[int, tuple[Tape, ForwardBatch]] = {}

    @property
    def sizes(self) -> list[int]:
        """Those recorded so far, ascending."""
        return sorted(self._tapes)

    def size_for(self, batch: ForwardBatch) -> int:
        """The number of requests of a decode, if it may be replayed; else 0."""
        return batch.batch_size if batch.mode is ForwardMode.DECODE and batch.batch_size <= self._max_batch else 0

    def replay(self, batch: ForwardBatch, size: int) -> torch.Tensor:
        """Logits [B, V] float32 of a decode of `size` requests; the next replay overwrites them."""
        self._inputs.fill(batch, size)
        if (found := self._tapes.get(size)) is not None:
            return found[0].run()
        model, recorded = self._runner.model, self._inputs.batch(size)
        self._runner.attention.plan(recorded)
        tape = Tape(self._workspace)
        logits_BV = tape.record(lambda: model.logits(model.forward(recorded)))
        if tape.obstacle is None:
            self._tapes[size] = tape, recorded
        else:
            logger.info("decode passes are not recorded: %s", tape.obstacle)
            self._runner.graphs = None
        return logits_BV
