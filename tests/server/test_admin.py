"""Endpoints beside generation: probes, reports, tokenizing, commands, keys."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.server.conftest import MODEL, Served, background, serve
from tests.server_process import wait_until


def _metrics(served: Served) -> dict[str, float]:
    text = served.http.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}


def test_models(served: Served) -> None:
    (model,) = served.openai.models.list().data
    assert model.id == MODEL
    assert served.openai.models.retrieve(MODEL).id == MODEL
    assert served.http.get(f"/v1/models/{MODEL}x").json()["error"]["code"] == "model_not_found"
    assert served.http.get(f"/v1/models/{MODEL}x").status_code == 404


def test_probes(served: Served) -> None:
    for path in ("/health", "/health_generate", "/ready"):
        assert served.http.get(path).status_code == 200


def test_health_needs_an_answer_of_the_rank() -> None:
    with serve(health_timeout=0.2) as served:
        assert served.rank is not None
        served.rank.mute.set()
        served.rank.hold.set()
        for path in ("/health", "/health_generate"):
            response = served.http.get(path)
            assert response.status_code == 503
            assert "0.2 s" in response.json()["error"]["message"]
        served.rank.mute.clear()
        served.rank.hold.clear()
        for path in ("/health", "/health_generate"):
            wait_until(lambda path=path: served.http.get(path).status_code == 200, 60)  # type: ignore[misc]


def test_a_busy_engine_is_a_healthy_one() -> None:
    """Statement 24: the probe need not have its turn, because tokens for others say as much."""
    with serve(max_running=1, health_timeout=60) as served:
        rank = served.rank
        assert rank is not None
        rank.hold.set()
        with background(served, {"prompt": "a", "max_tokens": 400}):
            wait_until(lambda: rank.num_samples == 1)
            rank.allow(1)
            wait_until(lambda: rank.steps == 1)
            served.http.get("/server_info")  # the rank's answer comes behind all tokens that it has made
            with background(served, None, "/health_generate", "GET") as answers:
                wait_until(lambda: rank.num_samples == 2)
                rank.allow(1)
            assert answers[0].status_code == 200
            rank.hold.clear()


def test_info(served: Served) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = served.http.get(path).json()
        assert info["served_model_name"] == MODEL
        assert info["page_size"] == 16
        assert info["engine"]["context_length"] == 512
        assert (info["quantization"], info["engine"]["expert_dtype"]) == (None, None)
        assert info["internal_states"][0]["steps"] >= 0
    for path in ("/model_info", "/get_model_info"):
        info = served.http.get(path).json()
        assert (info["model_path"], info["is_generation"], info["vocab_size"]) == ("tiny", True, 320)


def test_load(served: Served) -> None:
    (load,) = served.http.get("/get_load").json()  # before the first step
    assert (load["dp_rank"], load["num_reqs"], load["max_total_num_tokens"]) == (0, 0, 4096)
    served.openai.completions.create(model=MODEL, prompt="a", max_tokens=1)
    (load,) = served.http.get("/get_load").json()
    assert (load["dp_rank"], load["num_reqs"], load["num_waiting_reqs"], load["num_tokens"]) == (0, 0, 0, 0)
    assert served.http.get("/v1/loads").json()["loads"][0]["max_total_num_tokens"] == 4096


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(served: Served, prefix: str) -> None:
    answer = served.http.post(f"{prefix}/tokenize", json={"prompt": "aé"}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == ([97, 195, 169], 3, 512)
    answer = served.http.post(f"{prefix}/tokenize", json={"text": ["a", "bc"]}).json()
    assert (answer["tokens"], answer["count"]) == ([[97], [98, 99]], [1, 2])
    answer = served.http.post(f"{prefix}/detokenize", json={"tokens": [97, 195, 169, 257]}).json()
    assert answer["text"] == "aé"
    assert served.http.post(f"{prefix}/detokenize", json={"token_ids": [[97], [98]]}).json()["text"] == ["a", "b"]
    assert served.http.post(f"{prefix}/detokenize", json={"tokens": []}).json()["text"] == ""
    assert served.error(f"{prefix}/detokenize", {"tokens": [-1]})["param"] == "tokens"
    assert served.error(f"{prefix}/detokenize", {"tokens": "abc"})["param"] == "tokens"


def test_flush_cache(served: Served) -> None:
    assert served.http.post("/flush_cache").status_code == 200
    assert served.rank is not None
    served.rank.hold.set()
    with background(served, {"prompt": "a", "max_tokens": 1}):
        wait_until(lambda: served.rank is not None and served.rank.num_samples == 1)
        assert "running" in served.error("/flush_cache", {})["message"]
        served.rank.hold.clear()


def test_authorization() -> None:
    with serve(api_key="secret") as served:
        assert served.openai.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
        for headers in ({}, {"authorization": "Bearer secret2"}, {"authorization": "secret"}):
            with httpx.Client(base_url=served.url, headers=headers, timeout=60) as http:
                for path in ("/v1/models", "/server_info", "/nothing"):
                    response = http.get(path)
                    assert response.status_code == 401
                    assert response.json()["error"]["code"] == "invalid_api_key"
                for path in ("/health", "/ready", "/metrics"):
                    assert http.get(path).status_code == 200
        assert "secret" not in served.http.get("/server_info").text


def test_metrics() -> None:
    with serve() as served:
        served.openai.completions.create(model=MODEL, prompt=["abc", "d"], max_tokens=5)
        served.openai.completions.create(model=MODEL, prompt="abc", max_tokens=9, stop="b")
        served.error("/v1/completions", {"prompt": ""})
        assert served.http.get("/health").status_code == 200  # behind the rank's word of the sample that was stopped
        found = _metrics(served)
        assert found['lockstep_requests_total{finish_reason="length"}'] == 2
        assert found['lockstep_requests_total{finish_reason="stop"}'] == 1
        assert found['lockstep_requests_total{finish_reason="abort"}'] == 0
        assert found['lockstep_http_errors_total{status="400"}'] == 1
        assert found["lockstep_prompt_tokens_sum"] == 7
        assert found["lockstep_completion_tokens_sum"] == 12
        buckets = [
            found[f'lockstep_completion_tokens_bucket{{le="{end}"}}'] for end in ("1.0", "2.0", "4.0", "8.0", "+Inf")
        ]
        assert buckets == [0, 1, 1, 3, 3]  # of 2, 5 and 5 tokens
        assert found["lockstep_time_to_first_token_seconds_count"] == 2
        assert found["lockstep_request_seconds_count"] == 2
        assert found["lockstep_inter_token_seconds_count"] == 4 + 4 + 1
        assert found['lockstep_running_requests{rank="0"}'] == 0
        assert found['lockstep_total_tokens{rank="0"}'] == 4096


def test_abort_by_name() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        body = {"prompt": "abc", "max_tokens": 400, "n": 2, "rid": "mine"}
        with background(served, body) as answers:
            wait_until(lambda: served.rank is not None and served.rank.num_samples == 2)
            assert served.error("/abort_request", {"rid": ""})["param"] == "rid"
            assert served.error("/abort_request", {})["param"] == "rid"
            assert served.http.post("/abort_request", json={"rid": "min"}).json() == {"aborted": 0}
            assert served.http.post("/abort_request", json={"rid": "other"}).json() == {"aborted": 0}
            assert served.rank.num_samples == 2
            assert served.error("/v1/completions", body)["param"] == "rid"
            assert served.http.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 2}
        assert [choice["finish_reason"] for choice in answers[0].json()["choices"]] == ["abort", "abort"]
        assert served.http.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 0}
        served.rank.hold.clear()
        assert served.http.post("/v1/completions", json=body).json()["id"] == "mine"
        found = _metrics(served)
        assert found['lockstep_requests_total{finish_reason="abort"}'] == 2
        assert found['lockstep_running_requests{rank="0"}'] == found['lockstep_waiting_requests{rank="0"}'] == 0


def test_abort_all() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        body = {"text": ["a", "b"], "rid": ["x", "y"]}
        with background(served, body, "/generate") as native, background(served, {"prompt": "abc"}) as text:
            wait_until(lambda: served.rank is not None and served.rank.num_samples == 3)
            assert served.http.post("/abort_request", json={"rid": "y"}).json() == {"aborted": 1}
            wait_until(lambda: served.rank is not None and served.rank.num_samples == 2)
            assert served.http.get("/health").status_code == 200  # behind the abort's answer
            assert served.http.post("/abort_request", json={"rid": "", "abort_all": True}).json() == {"aborted": 2}
        reasons = [answer["meta_info"]["finish_reason"] for answer in native[0].json()]
        assert reasons == [{"type": "abort", "message": "aborted"}] * 2
        assert text[0].json()["choices"][0]["finish_reason"] == "abort"
