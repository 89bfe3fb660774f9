"""What the schedulers of prefill and decode servers share: when one half of a request ends, the other hears of it.

See `prefill_scheduler` and `decode_scheduler` for the two roles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from disagg.base import KVReceiver, KVSender, Role
from scheduler.hand_over import HandOver
from scheduler.memory import KVMemory
from scheduler.messages import Bootstrap, Finish, GenerateRequest
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerLimits

End = TypeVar("End", KVSender, KVReceiver)


class HandOverScheduler(Scheduler, ABC, Generic[End]):
    """A scheduler whose requests each own one end of a room. role: that of its server."""

    role: ClassVar[Role]

    def __init__(
        self, memory: KVMemory, limits: SchedulerLimits, eos_token_ids: tuple[int, ...], hand_over: HandOver
    ) -> None:
        super().__init__(memory, limits, eos_token_ids)
        self.hand_over = hand_over

    @abstractmethod
    def _create_end(self, bootstrap: Bootstrap) -> End:
        """ValueError when the room is no room or belongs to another request."""

    @abstractmethod
    def _begin(self, request: Request, end: End) -> None:
        """Give a new request its end of the room and put it into the role's first queue."""

    def _refusal(self, message: GenerateRequest) -> Finish | None:
        if message.bootstrap is None:
            return Finish("abort", message=f"bootstrap_room is missing: this is a {self.role} server", status=400)
        return super()._refusal(message)

    def _refuse(self, message: GenerateRequest, refusal: Finish) -> None:
        super()._refuse(message, refusal)
        if message.bootstrap is None:
            return
        try:
            end = self._create_end(message.bootstrap)
        except ValueError:
            return  # the room is another request's, whose other half must not hear of this
        end.abort(refusal.message)  # now the other half does not wait in vain
        end.clear()

    def _enqueue(self, request: Request) -> None:
        assert request.message.bootstrap is not None
        try:
            end = self._create_end(request.message.bootstrap)
        except ValueError as error:
            del self.requests[request.rid]
            super()._refuse(request.message, Finish("abort", message=str(error), status=400))
            return
        self._begin(request, end)

    def _fail(self, request: Request, reason: str, status: int = 500) -> None:
        """End a live request whose hand-over has failed."""
        self.hand_over.failed_total += 1
        self._early_outputs.append(self._end(request, Finish("abort", message=reason, status=status)))
