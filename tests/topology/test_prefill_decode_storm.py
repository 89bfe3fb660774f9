"""Many requests at a decode server with too little memory, half of them given up on the way. A sweep."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server_process import ServerProcess
from tests.topology.cluster import TINY, Call, cluster_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.sweep]
TOTAL, AT_ONCE = 200, 16
PROBE = "Once upon a time"


def request_of(number: int) -> tuple[list[int], int]:
    """Prompt and output length; prompts share beginnings."""
    rng = random.Random(number)
    stem = [11 + i % 190 for i in range(90)]
    prompt = stem[: rng.randrange(90)] + rng.choices(range(5, 250), k=rng.randrange(1, 60))
    return prompt, rng.randrange(20, 60)


@pytest.fixture(scope="module")
def texts() -> dict[int, str]:
    """What one process with memory for everybody says."""
    server = ServerProcess(*TINY, "--max-total-tokens", "4096")
    try:
        url = server.wait_ready()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return dict(
                threads.map(lambda number: (number, Call(url, *request_of(number)).wait(120).text), range(TOTAL))
            )
    finally:
        server.stop()


@pytest.mark.parametrize("backend", ["tcp", "mooncake", "nixl"])
def test_those_who_stay_get_their_answers(backend: str, texts: dict[int, str]) -> None:
    leaving = random.Random(12)
    patience = {number: leaving.choice([0, 0.02, 0.1, 0.3, 1.0]) for number in leaving.sample(range(TOTAL), TOTAL // 2)}

    with cluster_of(
        backend=backend,
        prefill_args=("--chunked-prefill-size=32",),
        decode_args=("--max-total-tokens=1024", "--context-length=256", "--num-reserved-decode-tokens=0"),
    ) as cluster:

        def ask(number: int) -> tuple[int, Call]:
            call = Call(cluster.url, *request_of(number))
            if number in patience:
                call._thread.join(patience[number])
                call.leave()
            else:
                call.wait(120)
            return number, call

        probe = Call(cluster.url, PROBE).wait().text
        with cluster.kept_whole(PROBE, probe):
            with ThreadPoolExecutor(AT_ONCE) as threads:
                for number, call in threads.map(ask, range(TOTAL)):
                    if number not in patience:
                        assert (call.error, call.text) == (None, texts[number]), number
            assert sum(state["retractions_total"] for state in cluster.states("decode")) > 0
