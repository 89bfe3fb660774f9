"""Arrivals that reports about other servers name: ranks with nothing to do, ranks that run dry, ranks that fail."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from scheduler.config import EngineConfig
from scheduler.messages import SamplingParams
from tests.models.support import VOCAB_SIZE, make_checkpoint, random_ids
from tests.server_process import ROOT, ServerProcess, gone, wait_until
from tests.topology.engine_rank import Scenario, run_on_ranks, run_scenario

Launch = Callable[..., ServerProcess]
RANKS = 4
FLAGS = ("--model-path", "tiny-qwen3-moe", "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
GROUPS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--max-total-tokens", "2048")


def uneven_rounds() -> tuple[list[list[list[int]]], list[SamplingParams]]:
    """A request for each rank alone, one for all but the last, and a long request beside many short ones."""
    prompts = [random_ids(length, seed=length) for length in (9, 30, 1, 17)]
    rounds = [[prompt if index == rank else [] for index, prompt in enumerate(prompts)] for rank in range(RANKS)]
    rounds.append([*prompts[:3], []])
    rng = random.Random(33)
    drain: list[list[int]] = [random_ids(rng.randrange(1, 24), seed=100 + number) for number in range(5 * RANKS)]
    rounds.append([[] if number % RANKS == 0 and number else prompt for number, prompt in enumerate(drain)])
    lengths = [28, 9, 12, 5, *(rng.randrange(1, 12) for _ in drain[4:])]
    return rounds, [SamplingParams(length, 0, temperature=0.0, ignore_eos=True) for length in lengths]


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_ranks_with_nothing_to_do_take_part() -> None:
    """On prefill and decode engines too, where a rank has requests that it cannot schedule before their KV is there."""
    rounds, params = uneven_rounds()
    named = {}
    for name, settings in {
        "none": {"moe_a2a_backend": "none"},
        "megamoe": {"moe_a2a_backend": "megamoe", "disable_overlap_schedule": False},
        "dense": {"model_path": "tiny-llama"},
        "deepep, hand-over": {"moe_a2a_backend": "deepep", "chunked_prefill_size": 16},
    }.items():
        values: dict[str, Any] = {"model_path": "tiny-qwen3-moe", "max_total_tokens": 1024, **settings}
        config = EngineConfig(dtype="float32", device="cpu", num_threads=1, **values)
        named[name] = Scenario(config, rounds, params, prefill_decode="hand-over" in name)
    expected = {model: run_scenario(named[name]) for model, name in (("moe", "none"), ("dense", "dense"))}
    by_rank = run_on_ranks(list(named.values()), timeout=380.0, tp_size=RANKS, dp_size=RANKS, enable_dp_attention=True)
    for number, name in enumerate(named):
        tokens = iter([g.token_ids for g in expected["dense" if name == "dense" else "moe"].generations])
        wanted: list[list[list[int]]] = [[] for _ in range(RANKS)]
        for prompts in rounds:
            for index, prompt in enumerate(prompts):
                if prompt:
                    wanted[index % RANKS].append(next(tokens))
        got = [[generation.token_ids for generation in results[number].generations] for results in by_rank]
        assert got == wanted, name


@pytest.mark.timeout(600)
def test_ranks_of_a_group_choose_alike_among_equals(tmp_path: Path) -> None:
    """Every token of the vocabulary's second half, which the second rank holds, has the logit of one of the first."""
    make_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head_VH = tensors["lm_head.weight"]
    head_VH[VOCAB_SIZE // 2 :] = head_VH[: VOCAB_SIZE // 2]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = [random_ids(length, seed=length) for length in range(1, 17)]
    greedy = [SamplingParams(8, 0, temperature=0.0, ignore_eos=True)] * len(prompts)
    sampled = [SamplingParams(12, seed, temperature=1.0, ignore_eos=True) for seed in range(len(prompts))]
    config = EngineConfig(model_path=str(tmp_path), dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    scenarios = [Scenario(config, [prompts], params) for params in (greedy, sampled)]
    expected = [[g.token_ids for g in run_scenario(scenario).generations] for scenario in scenarios]
    assert all(token < VOCAB_SIZE // 2 for tokens in expected[0] for token in tokens)
    assert any(token >= VOCAB_SIZE // 2 for tokens in expected[1] for token in tokens)
    for results in run_on_ranks(scenarios, tp_size=2):
        assert [[g.token_ids for g in result.generations] for result in results] == expected


# Runs in every process of the server before anything else; only rank processes are changed. A rank that came to the
# interpreter's own end would end by a signal.
CHANGED_STEP = """
import sys
if "scheduler.rank" in sys.orig_argv:
    import atexit, os, threading
    import scheduler.engine
    atexit.register(os.abort)
    step, steps = scheduler.engine.Engine.step, 0
    def changed(self):
        global steps
        steps += 1
        if self.groups.rank == 1 and steps == 20:
            {}
        return step(self)
    scheduler.engine.Engine.step = changed
"""


def serve_with(launch_server: Launch, folder: Path, change: str, *flags: str) -> ServerProcess:
    """A server in whose 20th step rank 1 does something else. It has no request itself: it only takes part."""
    (folder / "sitecustomize.py").write_text(CHANGED_STEP.format(change))
    server = launch_server(*FLAGS, *GROUPS, *flags, env={"PYTHONPATH": f"{folder}:{ROOT}"})
    url = server.wait_ready()
    ranks = server.ranks()
    params = {"max_new_tokens": 500, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": params, "routed_dp_rank": 0}
    assert httpx.post(f"{url}/generate", json=body, timeout=120).status_code == 500
    assert server.wait(60) == 1
    assert gone(ranks)
    return server


@pytest.mark.timeout(240)
def test_an_exception_in_the_step_of_one_rank_ends_all(launch_server: Launch, tmp_path: Path) -> None:
    log = serve_with(launch_server, tmp_path, "raise AssertionError('of this test')").stderr()
    assert log.index("AssertionError: of this test") < log.index("stopping the server")
    assert "rank 1 ended unexpectedly (exit status 1)" in log


@pytest.mark.timeout(240)
def test_a_rank_that_hangs_and_those_that_wait_for_it_say_where(launch_server: Launch, tmp_path: Path) -> None:
    log = serve_with(launch_server, tmp_path, "threading.Event().wait()", "--watchdog-timeout=4").stderr()
    late = r"^error: rank {}: step \d+ has taken more than --watchdog-timeout 4 s and is at "
    assert re.search(late.format(0) + "the agreement on a plan$", log, re.MULTILINE)
    assert re.search(late.format(1), log, re.MULTILINE)
    assert re.search(r"^rank 0: +File .* in all_gather$", log, re.MULTILINE)
    assert re.search(r"^rank 1: +File .* in changed$", log, re.MULTILINE)


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_thousand_requests_around_the_idle_moment(launch_server: Launch) -> None:
    """One token each, from four clients at random gaps, by turns and by name; caches are flushed in between."""
    server = launch_server(*FLAGS, *GROUPS)
    url = server.wait_ready()
    rng = random.Random(41)
    prompts = [random_ids(rng.randrange(1, 20), seed=seed) for seed in range(40)]
    config = EngineConfig(model_path=FLAGS[1], dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    greedy = [SamplingParams(1, 0, temperature=0.0, ignore_eos=True)] * len(prompts)
    expected = [g.token_ids for g in run_scenario(Scenario(config, [prompts], greedy)).generations]
    with httpx.Client(timeout=120) as client:

        def ask(number: int) -> tuple[list[int], list[int]]:
            gap = random.Random(number).choice([0.0, 0.0, 0.001, 0.01, 0.05, 0.1])
            time.sleep(gap)
            if number % 25 == 0:
                client.post(f"{url}/flush_cache")  # refused while others run
            body: dict[str, Any] = {"input_ids": prompts[number % len(prompts)]}
            body["sampling_params"] = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
            if number % 3:
                body["routed_dp_rank"] = number % 2
            answer = client.post(f"{url}/generate", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["output_ids"], expected[number % len(prompts)]

        with ThreadPoolExecutor(4) as threads:
            for got, wanted in threads.map(ask, range(1000), timeout=500):
                assert got == wanted

        def loads() -> list[int]:
            return [
                load["num_running_reqs"] + load["num_waiting_reqs"] for load in client.get(f"{url}/get_load").json()
            ]

        wait_until(lambda: not any(loads()), what="nothing is left")
    server.signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert "memory leak" not in server.stderr()
