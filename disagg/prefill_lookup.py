"""How a decode rank finds its prefill ranks: questions to a bootstrap server, asked until there is an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from disagg.base import KVArgs
from disagg.bootstrap_client import (
    BootstrapClient,
    BootstrapNotReady,
    BootstrapRefused,
    BootstrapUnreachable,
    Registration,
)
from disagg.tp_plan import legs_of, sizes_refusal

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_INTERVAL = 1.0
_WHAT_TO_CHECK = (
    "check bootstrap_host and bootstrap_port of the request, and that a prefill server with this "
    "--disaggregation-bootstrap-port runs there and can be reached from here"
)


class Unfit(Exception):
    """A prefill server that can never send to this rank as the two were started."""


class Lookup:
    """Questions to one bootstrap server. problem: why the last one has no answer so far."""

    def __init__(self, bootstrap_addr: str) -> None:
        self.problem = f"it has not answered yet; {_WHAT_TO_CHECK}"
        self._client = BootstrapClient(bootstrap_addr)

    def ask(self, question: Callable[[BootstrapClient], T | None], wait: Callable[[float], bool]) -> T | None:
        """Ask until all prefill ranks have registered; None once nobody waits for the answer.

        question: None for an answer that is of no use yet. wait: called with the seconds until the next attempt; False
        when there is to be none. BootstrapRefused, and whatever else the question raises.
        """
        told = False
        while True:
            try:
                answer = question(self._client)
                if answer is not None:
                    return answer
            except BootstrapNotReady as error:
                self.problem = str(error)
                if isinstance(error, BootstrapUnreachable):
                    self.problem += f"; {_WHAT_TO_CHECK}"
                if not told:  # requests may wait long for what a wrong port will never give
                    logger.warning("requests wait, --disaggregation-bootstrap-timeout seconds at most: %s", error)
                    told = True
            if not wait(_RETRY_INTERVAL):
                return None


def sending_ranks(client: BootstrapClient, args: KVArgs, dp_rank: int) -> list[Registration] | None:
    """The prefill ranks that a decode rank gets bytes from; None while they restart. Unfit where TP sizes do not join.

    args: the decode rank's. dp_rank: the data-parallel rank of the prefill server.
    """
    route = client.route(dp_rank, 0)
    if route.tp_size < 1:
        raise BootstrapRefused(f"it says that it has {route.tp_size} tensor-parallel ranks")
    problem = sizes_refusal(route.tp_size, args.tp_size)
    if problem:
        raise Unfit(problem)
    legs = legs_of(args.tp_rank, args.tp_size, route.tp_size, args.total_kv_head_num)
    found = [client.route(dp_rank, leg.prefill_rank).registration for leg in legs]
    # A server that restarts meanwhile must not be mixed with its predecessor.
    same = all(registration.incarnation == found[0].incarnation for registration in found)
    return found if same else None
