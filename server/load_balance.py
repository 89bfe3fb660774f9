"""Which data-parallel rank gets a request."""

from __future__ import annotations

import itertools

from scheduler.messages import GenerateRequest

# A request may announce a huge output and stop early: no more of it than this counts.
_MOST_OUTPUT_COUNTED = 4096


def resolve(method: str, disaggregation_mode: str) -> str:
    """The method of a server that was given `EngineConfig.load_balance_method`."""
    if disaggregation_mode == "prefill":
        # A decode server finds the rank that has the prompt by the room alone.
        return "follow_bootstrap_room"
    return "round_robin" if method == "auto" else method


class LoadBalancer:
    """Keeps count of the live samples of each rank, and chooses by them.

    method: "round_robin" takes the ranks in turn; "total_requests" the one with the fewest live samples, "total_tokens"
    that with the fewest tokens, announced ones included; of equals the one that was chosen longest ago.
    "follow_bootstrap_room" takes the rank bootstrap_room modulo their number, and a request without a room in turn.
    """

    def __init__(self, num_ranks: int, method: str = "round_robin") -> None:
        self._method = method
        self._requests = [0] * num_ranks
        self._tokens = [0] * num_ranks
        self._last_chosen = [-1] * num_ranks
        self._turn = itertools.count()
        self._live: dict[str, tuple[int, int]] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._requests)

    def choose(self, request: GenerateRequest) -> int:
        """A rank for one prompt, or for one sample that has a room."""
        if self._method == "follow_bootstrap_room" and request.bootstrap is not None:
            return request.bootstrap.room % self.num_ranks
        turn = next(self._turn)
        if self._method == "total_requests":
            rank = min(range(self.num_ranks), key=lambda rank: (self._requests[rank], self._last_chosen[rank]))
        elif self._method == "total_tokens":
            rank = min(
                range(self.num_ranks),
                key=lambda rank: (self._tokens[rank], self._requests[rank], self._last_chosen[rank]),
            )
        else:
            rank = turn % self.num_ranks
        self._last_chosen[rank] = turn
        return rank

    def start(self, sample: str, request: GenerateRequest, rank: int) -> None:
        tokens = len(request.input_ids) + min(request.sampling.max_new_tokens, _MOST_OUTPUT_COUNTED)
        self._live[sample] = (rank, tokens)
        self._requests[rank] += 1
        self._tokens[rank] += tokens

    def end(self, sample: str) -> None:
        """Unknown samples are a no-op."""
        found = self._live.pop(sample, None)
        if found is not None:
            rank, tokens = found
            self._requests[rank] -= 1
            self._tokens[rank] -= tokens
