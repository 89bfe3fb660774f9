"""One rank's part in the agreement on every step, see `scheduler.step_plan`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from layers.forward_batch import ForwardMode
from layers.process_groups import RankGroups
from scheduler.batch import Batch
from scheduler.messages import RequestOutput
from scheduler.scheduler import Scheduler
from scheduler.step_plan import StepPlan, StepRow, StepState, make_plan


class Lockstep:
    """Ranks call `agree` once a step, all of them or none.

    is_busy: whether any rank had a live request or a step under way at the last agreement. Until one says that nobody
        has, every rank goes on to the next.
    """

    def __init__(self, groups: RankGroups, graph_sizes: Sequence[int] = ()) -> None:
        self.is_busy = False
        self._groups = groups
        self._graph_sizes = graph_sizes
        self._steps = 0

    def agree(
        self, scheduler: Scheduler, batch: Batch | None, outputs: Sequence[RequestOutput], results_pending: bool
    ) -> StepPlan:
        """The plan of this step. batch: this rank's, if any. outputs: of the step before. Desync."""
        row = self.row(scheduler, batch, outputs, results_pending)
        return self.plan([StepRow(*values) for values in self._groups.world.all_gather(row)])

    def row(
        self, scheduler: Scheduler, batch: Batch | None, outputs: Sequence[RequestOutput], results_pending: bool
    ) -> StepRow:
        mode = ForwardMode.IDLE if batch is None else batch.mode
        return StepRow(
            self._steps,
            int(mode),
            0 if batch is None else batch.num_tokens,
            0 if batch is None else len(batch.items),
            int(bool(self._graph_sizes) and mode is not ForwardMode.EXTEND),
            int(results_pending),
            self._graph_sizes[-1] if self._graph_sizes else 0,
            *msgspec.structs.astuple(StepState.of(scheduler, outputs)),
        )

    def plan(self, table: Sequence[StepRow]) -> StepPlan:
        plan = make_plan(table, self._groups.layout, self._graph_sizes)
        self._steps += 1
        self.is_busy = plan.any_live or plan.any_pending
        return plan
