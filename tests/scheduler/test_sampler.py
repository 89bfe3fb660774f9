"""The sampler on logits made by hand: what each request's counts hold, and for how long."""

from __future__ import annotations

import pytest
import torch

from scheduler.batch import BatchItem
from scheduler.messages import Finish, GenerateRequest, SamplingParams
from scheduler.request import Request
from scheduler.sampler import Sampler

EOS = 0
LOGITS = [1.0, 5.0, 4.0, 3.5, -1.0]


def make_request(rid: str = "a", prompt: tuple[int, ...] = (3,), **params: object) -> Request:
    sampling = SamplingParams(**{"max_new_tokens": 50, "seed": 1, "temperature": 0.0, **params})  # type: ignore[arg-type]
    return Request(GenerateRequest(rid, list(prompt), sampling))


def item(request: Request) -> BatchItem:
    request.launched += 1
    return BatchItem(request, request.epoch, 0, 1, True, True, True, request.launched - 1)


def make_sampler(max_requests: int = 8) -> Sampler:
    return Sampler((EOS,), max_requests, torch.device("cpu"))


def step(sampler: Sampler, *requests: Request) -> list[int]:
    """Tokens of one step. The host does not hear of them, as in the overlap loop."""
    logits_NV = torch.tensor([LOGITS] * len(requests))
    tokens, valid = sampler.sample(logits_NV, [item(request) for request in requests])
    assert valid.all()
    found: list[int] = tokens.tolist()
    return found


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"frequency_penalty": 0.6}, [1, 1, 2, 1, 3, 2]),  # 5.0 4.4 4.0 3.8 3.5 3.4 after 3.2
        ({"presence_penalty": 1.2}, [1, 2, 1, 1, 1, 1]),  # 5.0 4.0 3.8
        ({"presence_penalty": 2.0}, [1, 2, 3, 1, 1, 1]),  # the 3 of the prompt is not counted
        ({"repetition_penalty": 1.2}, [1, 1, 1, 1, 1, 1]),  # 5.0 / 1.2 is above 4.0
        ({"repetition_penalty": 2.0}, [1, 2, 1, 1, 1, 1]),  # the 3 of the prompt is
        ({"repetition_penalty": 6.0}, [1, 2, 0, 1, 1, 1]),
        ({"logit_bias": ((1, -100.0),)}, [2, 2, 2, 2, 2, 2]),
        ({"logit_bias": ((1, -2.0), (4, 6.0))}, [4, 4, 4, 4, 4, 4]),
        ({"logit_bias": ((4, 6.1),), "frequency_penalty": 0.3}, [4, 1, 4, 1, 4, 1]),  # 5.1 5.0 4.8 4.7 4.5 4.4
        ({"logit_bias": ((EOS, 50.0),), "min_new_tokens": 2}, [1, 1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_greedy_tokens(params: dict[str, object], expected: list[int]) -> None:
    sampler, request = make_sampler(), make_request(**params)
    assert [step(sampler, request)[0] for _ in expected] == expected


def test_requests_of_a_batch_do_not_touch_each_other() -> None:
    settings: list[dict[str, object]] = [
        {"frequency_penalty": 0.6},
        {},
        {"logit_bias": ((1, -100.0), (2, 0.5))},
        {"temperature": 1.5, "presence_penalty": 2.0, "seed": 5},
        {"temperature": 1.5, "repetition_penalty": 3.0, "logit_bias": ((2, 1.0),), "top_k": 3},
        {"min_new_tokens": 3, "stop_token_ids": (1,)},
    ]
    alone = []
    for params in settings:
        sampler, request = make_sampler(), make_request(**params)
        alone.append([step(sampler, request)[0] for _ in range(12)])
    sampler = make_sampler()
    requests = [make_request(str(i), **params) for i, params in enumerate(settings)]
    together = [step(sampler, *requests) for _ in range(12)]
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone
    # In another order, and with some that sit out a step.
    sampler = make_sampler()
    requests = [make_request(str(i), **params) for i, params in enumerate(settings)]
    got: list[list[int]] = [[] for _ in settings]
    for number in range(24):
        chosen = [i for i in range(6) if i % 2 == number % 2][:: -1 if number % 3 else 1]
        for i, token in zip(chosen, step(sampler, *(requests[i] for i in chosen)), strict=True):
            got[i].append(token)
    assert got == alone


def test_counts_begin_again_from_what_the_host_knows() -> None:
    """As after a retraction, which drops a token under way, and on a decode server, which gets the first token."""
    params = {"frequency_penalty": 0.6}
    sampler, request = make_sampler(), make_request(**params)
    assert [step(sampler, request)[0] for _ in range(4)] == [1, 1, 2, 1]
    request.output_ids += [1, 1, 2]  # the fourth had not arrived
    request.epoch += 1
    request.launched = 3
    assert [step(sampler, request)[0] for _ in range(3)] == [1, 3, 2]
    taken_over = make_request(**params)
    taken_over.output_ids, taken_over.launched = [1], 1
    assert [step(make_sampler(), taken_over)[0]] == [1]
    sampler = make_sampler()
    taken_over.launched = 1
    assert [step(sampler, taken_over)[0] for _ in range(5)] == [1, 2, 1, 3, 2]


def test_a_request_of_the_same_name_has_counts_of_its_own() -> None:
    sampler = make_sampler()
    for _ in range(3):
        request = make_request("a", frequency_penalty=0.6)
        assert [step(sampler, request)[0] for _ in range(5)] == [1, 1, 2, 1, 3]
        request.finish = Finish("length")


def test_memory_is_used_for_those_that_ask_and_as_long_as_they_do() -> None:
    sampler = make_sampler(max_requests=6)
    plain = make_request("plain")
    biased = make_request("biased", logit_bias=((1, 1.0),))
    step(sampler, plain, biased)
    assert sampler.counts.num_slots == 0
    many = [make_request(str(i), presence_penalty=0.5) for i in range(5)]
    for count, slots in ((1, 4), (4, 4), (5, 6), (2, 6)):
        step(sampler, plain, *many[:count])
        assert sampler.counts.num_slots == slots
    for _ in range(20):  # one after another in the sixth place
        request = make_request("next", repetition_penalty=1.1)
        step(sampler, request)
        assert sampler.counts.num_slots == 6
        request.finish = Finish("stop")
    for request in many:
        request.finish = Finish("length")
    step(sampler, plain)
    assert sampler.counts.num_slots == 0


def test_logits_stay_as_they_are_where_log_probabilities_are_wanted() -> None:
    params = SamplingParams(5, 0, temperature=0.0, presence_penalty=2.0, logit_bias=((1, -9.0),), min_new_tokens=1)
    wanting = Request(GenerateRequest("wanting", [3], params, logprobs=True))
    logits_NV = torch.tensor([LOGITS] * 2)
    tokens, _ = make_sampler().sample(logits_NV, [item(make_request("b", repetition_penalty=1.5)), item(wanting)])
    assert tokens.tolist() == [1, 2]
    assert logits_NV.tolist() == [LOGITS] * 2


def test_nothing_waits_for_the_device() -> None:
    """On tensors without data, which cannot say what is in them."""
    meta = torch.device("meta")
    sampler = Sampler((EOS,), 70, meta)
    params = {"frequency_penalty": 0.5, "logit_bias": ((1, 1.0), (2, -1.0)), "min_new_tokens": 2}
    requests = [make_request(str(i), **params if i % 3 else {}) for i in range(70)]
    for step_number in range(3):
        logits_NV = torch.empty(70, len(LOGITS), device=meta)
        tokens, valid = sampler.sample(logits_NV, [item(request) for request in requests])
        assert (tokens.shape, tokens.device, valid.shape) == ((70,), meta, (70,))
        requests[step_number + 1].epoch += 1
        requests[step_number + 1].output_ids = [1, 2]


def test_nan_logits_end_a_penalized_row_only() -> None:
    sampler = make_sampler()
    requests = [make_request(str(i), frequency_penalty=0.5) for i in range(3)]
    logits_NV = torch.tensor([LOGITS] * 3)
    logits_NV[1, 2] = float("nan")
    tokens, valid = sampler.sample(logits_NV, [item(request) for request in requests])
    assert valid.tolist() == [True, False, True]
    assert tokens.tolist()[::2] == [1, 1]
    requests[1].finish = Finish("abort")
    assert step(sampler, requests[0], requests[2]) == [1, 1]
