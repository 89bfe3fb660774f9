"""The default model through the engine: the text that `transformers` generates from the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import SamplingParams

# Chosen for their margins: some prompts have near ties within the first tokens ("What is the capital of France?").
CHATS = ["Count from one to ten.", "What is 2+2?", "Name the days of the week."]
COMPLETION = "The capital of France is"
NEW_TOKENS = 10
SMALLEST_MARGIN = 0.1


@pytest.mark.timeout(600)
def test_smollm2_text_equals_transformers(smollm2_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in CHATS
    ]
    prompts.append(tokenizer(COMPLETION)["input_ids"])
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        margins = [float(top.values[0, 0] - top.values[0, 1]) for top in (s.topk(2) for s in result.scores)]
        assert min(margins) > SMALLEST_MARGIN, margins
        expected.append(result.sequences[0, len(prompt) :].tolist())
    engine = Engine(
        EngineConfig(
            model_path=str(smollm2_path),
            dtype="float32",
            device="cpu",
            max_total_tokens=2048,
            chunked_prefill_size=24,
            num_threads=1,
        )
    )
    got = engine.generate(prompts, [SamplingParams(NEW_TOKENS, 0, temperature=0.0)] * len(prompts))
    assert [tokenizer.decode(g.token_ids) for g in got] == [tokenizer.decode(tokens) for tokens in expected]
    assert " Paris" in tokenizer.decode(got[-1].token_ids)
