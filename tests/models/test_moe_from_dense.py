"""A Mixtral whose experts are copies of a dense model's MLP says exactly what the dense model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import models
from layers.kernels.cpu import PackedWeight
from layers.linear import pack_weights
from tests.models.mixtral_from_dense import convert
from tests.models.support import TOLERANCE, Runner, edit_json, make_checkpoint, random_ids


def greedy(runner: Runner, row: int, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """(tokens, [count, V] logits they were chosen from)."""
    logits = [runner.step((row, prompt))[0][-1]]
    while len(logits) < count:
        logits.append(runner.step((row, [int(logits[-1].argmax())]))[0][-1])
    return [int(row.argmax()) for row in logits], torch.stack(logits)


@pytest.mark.parametrize("tied", [False, True])
def test_twin_says_the_same(tmp_path: Path, tied: bool) -> None:
    make_checkpoint("llama", tmp_path / "dense", tie_word_embeddings=tied)
    convert(tmp_path / "dense", tmp_path / "moe")
    dense, moe = (Runner(*models.load_model(str(tmp_path / name))) for name in ("dense", "moe"))
    assert moe.info.architecture == "MixtralForCausalLM"
    chosen: set[int] = set()
    gate = moe.model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda _module, _inputs, routing: chosen.update(routing.topk_ids.flatten().tolist()))
    for row, length in enumerate((1, 20, 77), start=1):
        prompt = random_ids(length, seed=length)
        expected, expected_logits = greedy(dense, row, prompt, 32)
        tokens, logits = greedy(moe, row, prompt, 32)
        assert tokens == expected
        assert (logits - expected_logits).abs().max() < TOLERANCE
    assert chosen == set(range(8)), "the router should use all experts"


def test_twin_is_exact_in_bfloat16(tmp_path: Path) -> None:
    """Both models run the same packed products, and the combined sum of two equal outputs rounds back to them."""
    make_checkpoint("llama", tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "moe")
    runners = []
    for name in ("dense", "moe"):
        model, info = models.load_model(str(tmp_path / name), dtype="bfloat16")
        if not PackedWeight.accepts(model.lm_head.weight):
            pytest.skip("no matrix kernel for this CPU")
        pack_weights(model)
        runners.append(Runner(model, info))
    (tokens, logits), (twin_tokens, twin_logits) = (greedy(runner, 1, random_ids(30), 20) for runner in runners)
    assert twin_tokens == tokens
    assert torch.equal(twin_logits, logits)


@pytest.mark.slow
def test_twin_of_smollm2(tmp_path: Path, smollm2_path: Path) -> None:
    convert(smollm2_path, tmp_path / "moe")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    dense, moe = (
        Runner(*models.load_model(str(folder), dtype="float32"), max_requests=2)
        for folder in (smollm2_path, tmp_path / "moe")
    )
    # Prompts without a near tie in the tokens that follow.
    for row, text in enumerate(("1, 2, 3, 4, 5,", "Once upon a time"), start=1):
        prompt = tokenizer.encode(text)
        tokens, logits = greedy(dense, row, prompt, 8)
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 0.1
        assert greedy(moe, row, prompt, 8)[0] == tokens


def test_transformers_reads_the_twin_alike(tmp_path: Path) -> None:
    reference = make_checkpoint("llama", tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "moe")
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    ids = torch.tensor([random_ids(40)])
    with torch.no_grad():
        assert (twin(input_ids=ids).logits - reference(input_ids=ids).logits).abs().max() < TOLERANCE


def test_models_without_a_twin_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "dense")
    edit_json(tmp_path / "dense" / "config.json", attention_bias=True)
    with pytest.raises(ValueError, match="expected a Llama without biases"):
        convert(tmp_path / "dense", tmp_path / "moe")
    assert not (tmp_path / "moe").exists()
