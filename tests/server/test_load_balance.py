"""Which data-parallel rank a request gets, and that a request may say so itself."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.messages import Bootstrap, GenerateRequest, SamplingParams
from server.bootstrap_fields import check_rooms_lead_to
from server.errors import ApiError
from server.load_balance import LoadBalancer, resolve
from tests.server.conftest import Served


def request(prompt: int = 4, output: int = 4, room: int | None = None) -> GenerateRequest:
    bootstrap = None if room is None else Bootstrap("host", 1, room)
    return GenerateRequest("", [1] * prompt, SamplingParams(output, 0), bootstrap=bootstrap)


def choose(balancer: LoadBalancer, name: str, *requests: GenerateRequest) -> list[int]:
    """As the engine client does for one HTTP request; its samples are called name0, name1, ..."""
    ranks = []
    for index, one in enumerate(requests):
        ranks.append(balancer.choose(one))
        balancer.start(f"{name}{index}", one, ranks[-1])
    return ranks


def test_ranks_in_turn() -> None:
    balancer = LoadBalancer(3)
    assert [choose(balancer, name, request(), request()) for name in "ab"] == [[0, 1], [2, 0]]


def test_fewest_live_samples() -> None:
    balancer = LoadBalancer(2, "total_requests")
    assert choose(balancer, "a", *[request()] * 3) == [0, 1, 0]
    assert choose(balancer, "b", request()) == [1]
    for sample in ("a0", "a2", "a2", "never seen"):
        balancer.end(sample)
    assert [choose(balancer, name, request()) for name in "cde"] == [[0], [0], [1]]


def test_equally_many_go_in_turn() -> None:
    balancer = LoadBalancer(3, "total_requests")
    ranks = []
    for name in "abcdef":
        ranks += choose(balancer, name, request())
        balancer.end(f"{name}0")
    assert ranks == [0, 1, 2, 0, 1, 2]


def test_fewest_tokens_prompt_and_output() -> None:
    balancer = LoadBalancer(2, "total_tokens")
    assert choose(balancer, "a", request(prompt=100, output=50)) == [0]
    assert [choose(balancer, name, request(prompt=20, output=30)) for name in "bcd"] == [[1], [1], [1]]
    # 150 each now; the second has more samples.
    assert choose(balancer, "e", request()) == [0]


def test_rooms_decide_sample_by_sample() -> None:
    balancer = LoadBalancer(4, "follow_bootstrap_room")
    assert choose(balancer, "a", *[request(room=room) for room in (8, 9, 2**63 - 1)]) == [0, 1, 3]
    # Without rooms: in turn.
    assert [choose(balancer, name, request()) for name in "bc"] == [[0], [1]]


def test_prefill_servers_follow_rooms() -> None:
    # Local mode gives its flags to the servers of both kinds.
    assert resolve("auto", "prefill") == resolve("total_tokens", "prefill") == "follow_bootstrap_room"
    assert resolve("auto", "decode") == resolve("auto", "null") == "round_robin"
    assert resolve("total_tokens", "decode") == "total_tokens"


@pytest.mark.parametrize("rank", [-1, 1, 999, "a", 0.5, True, [0]])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_rank_out_of_range_is_refused(served: Served, path: str, rank: Any) -> None:
    body = {
        "/generate": {"text": "ab"},
        "/v1/completions": {"prompt": "ab"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
    }[path]
    error = served.error(path, {**body, "routed_dp_rank": rank})
    assert error["param"] == "routed_dp_rank"
    assert "must be a whole number from 0 to 0" in error["message"]


def test_rank_in_range_is_accepted(served: Served) -> None:
    response = served.http.post("/generate", json={"text": "ab", "routed_dp_rank": 0})
    assert response.status_code == 200, response.text


def test_a_prefill_server_refuses_a_rank_that_the_room_does_not_lead_to() -> None:
    rooms = [Bootstrap("host", 1, room) for room in (4, 6)]
    check_rooms_lead_to(0, rooms, 2)
    check_rooms_lead_to(0, [None], 2)
    with pytest.raises(ApiError, match="routed_dp_rank is 1, but bootstrap_room 4 modulo --dp-size 2 is 0"):
        check_rooms_lead_to(1, rooms, 2)
