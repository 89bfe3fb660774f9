"""Every fault of a checkpoint is one line that names what is wrong; what loads is exactly what the files hold."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import models
from layers.parallel import ParallelGroup, ParallelGroups
from layers.quantization import dequantize_block_fp8, quantize_block_fp8
from layers.weights import WeightPart, empty_parameter, slice_of
from models import ModelError
from models.checkpoint import Checkpoint
from models.loader import weight_parts
from models.presets import PRESETS
from tests.models.support import LLAMA3_ROPE, VOCAB_SIZE, Runner, edit_json, make_checkpoint, random_ids

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {"single": tmp_path_factory.mktemp("single"), "sharded": tmp_path_factory.mktemp("sharded")}
    make_checkpoint("llama", folders["single"])
    make_checkpoint("llama", folders["sharded"], max_shard_size="150KB")
    return folders


@pytest.fixture
def single(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint of one file, to be damaged."""
    return Path(shutil.copytree(originals["single"], tmp_path / "model"))


@pytest.fixture
def sharded(originals: dict[str, Path], tmp_path: Path) -> Path:
    """The same model in several shards with an index."""
    folder = Path(shutil.copytree(originals["sharded"], tmp_path / "model"))
    assert len(shards(folder)) >= 4
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_tensors(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace or add tensors of a file; None removes one."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def load(folder: Path, **options: Any) -> Any:
    return models.load_model(str(folder), **options)[0]


def error_of(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_same_weights(first: Any, second: Any) -> None:
    theirs = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


class TestFiles:
    def test_shards_hold_the_same_model(self, sharded: Path, originals: dict[str, Path]) -> None:
        assert_same_weights(load(sharded), load(originals["single"]))

    def test_parameters_are_the_files_tensors(self, single: Path) -> None:
        model, tensors = load(single), load_file(single / "model.safetensors")
        layer = model.model.layers[1]
        q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
        assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat((q, k, v)))
        gate, up = (tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat((gate, up)))
        assert torch.equal(layer.mlp.down_proj.weight, tensors[DOWN])

    @pytest.mark.parametrize("rename", [False, True])
    def test_missing_shard(self, sharded: Path, rename: bool) -> None:
        gone = shards(sharded)[1]
        if rename:
            gone.rename(sharded / "renamed.safetensors")
        else:
            gone.unlink()
        message = error_of(sharded)
        assert gone.name in message
        assert "missing" in message

    def test_empty_and_truncated_shards(self, sharded: Path) -> None:
        broken = shards(sharded)[1]
        content = broken.read_bytes()
        for size in (0, 20, len(content) - 1):
            broken.write_bytes(content[:size])
            message = error_of(sharded)
            assert broken.name in message
            assert "truncated" in message

    def test_shards_without_an_index(self, sharded: Path, originals: dict[str, Path]) -> None:
        (sharded / INDEX).unlink()
        assert_same_weights(load(sharded), load(originals["single"]))
        gone = shards(sharded)[0]
        gone.unlink()
        assert gone.name in error_of(sharded)

    def test_unrelated_files_without_an_index(self, single: Path) -> None:
        shutil.copy(single / "model.safetensors", single / "a.safetensors")
        (single / "model.safetensors").rename(single / "b.safetensors")
        message = error_of(single)
        assert "a.safetensors, b.safetensors" in message
        assert INDEX in message

    def test_the_only_file_may_have_any_name(self, single: Path, originals: dict[str, Path]) -> None:
        (single / "model.safetensors").rename(single / "weights.safetensors")
        assert_same_weights(load(single), load(originals["single"]))

    def test_no_weights(self, single: Path) -> None:
        (single / "model.safetensors").rename(single / "pytorch_model.bin")
        assert "no *.safetensors files" in error_of(single)

    @pytest.mark.parametrize("name", ["model.safetensors", "consolidated.00.safetensors"])
    def test_index_wins_over_a_stray_file(
        self, sharded: Path, originals: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        tensors = load_file(originals["single"] / "model.safetensors")
        save_file({key: tensor + 1 for key, tensor in tensors.items()}, sharded / name)
        with caplog.at_level(logging.WARNING, logger="models.checkpoint"):
            model = load(sharded)
        assert_same_weights(model, load(originals["single"]))
        assert [record.getMessage() for record in caplog.records if name in record.getMessage()] != []

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": "../other.safetensors"}}'])
    def test_bad_index(self, sharded: Path, content: str) -> None:
        (sharded / INDEX).write_text(content)
        assert f"{INDEX}: expected" in error_of(sharded)

    def test_tensor_in_two_shards(self, sharded: Path, originals: dict[str, Path]) -> None:
        index = json.loads((sharded / INDEX).read_text())["weight_map"]
        original = load_file(sharded / index[DOWN])[DOWN]
        other = next(path for path in shards(sharded) if path.name != index[DOWN])
        edit_tensors(other, {DOWN: original.clone()})
        assert_same_weights(load(sharded), load(originals["single"]))
        edit_tensors(other, {DOWN: original + 1})
        message = error_of(sharded)
        assert DOWN in message
        assert other.name in message
        assert index[DOWN] in message


class TestTensors:
    def test_wrong_shape(self, single: Path) -> None:
        file = single / "model.safetensors"
        edit_tensors(file, {DOWN: torch.zeros(64, 95)})
        message = error_of(single)
        assert f"model.safetensors: tensor {DOWN} has shape [64, 95]" in message
        assert "[64, 96]" in message

    def test_zero_elements(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", {DOWN: torch.zeros(0, 96)})
        assert f"{DOWN} has shape [0, 96]" in error_of(single)

    def test_missing_tensor(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", {DOWN: None})
        assert f"tensors are missing: {DOWN}" in error_of(single)

    def test_junk_tensor(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", {"model.layers.0.foo": torch.zeros(1)})
        assert "tensors are unknown: model.layers.0.foo (model.safetensors)" in error_of(single)

    def test_misspelt_tensor(self, single: Path) -> None:
        file = single / "model.safetensors"
        edit_tensors(file, {DOWN: None, DOWN.replace("down", "dwon"): load_file(file)[DOWN]})
        message = error_of(single)
        assert f"tensors are missing: {DOWN} and tensors are unknown: {DOWN.replace('down', 'dwon')}" in message

    def test_long_lists_are_cut(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", {f"junk.{i}": torch.zeros(1) for i in range(20)})
        assert "and 15 more" in error_of(single)

    def test_harmless_tensors_are_skipped_with_one_line(
        self, single: Path, originals: dict[str, Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        names = [
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.0.self_attn.k_scale",
            "model.layers.2.self_attn.attn.v_scale",
            "model.layers.3.mlp.down_proj.weight",
        ]
        edit_json(single / "config.json", num_nextn_predict_layers=1)
        edit_tensors(single / "model.safetensors", {name: torch.zeros(1) for name in names})
        with caplog.at_level(logging.INFO, logger="models.loader"):
            model = load(single)
        assert_same_weights(model, load(originals["single"]))
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert all(name in lines[0] for name in names)

    def test_layers_beyond_the_config_are_not_harmless(self, single: Path) -> None:
        edit_json(single / "config.json", num_hidden_layers=2)
        assert "tensors are unknown: model.layers.2." in error_of(single)

    def test_integer_tensor(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", {DOWN: torch.zeros(64, 96, dtype=torch.int32)})
        assert f"tensor {DOWN} has dtype I32" in error_of(single)

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
    def test_dtype_conversion(self, single: Path, stored: torch.dtype, wanted: str) -> None:
        tensors = {name: tensor.to(stored) for name, tensor in load_file(single / "model.safetensors").items()}
        save_file(tensors, single / "model.safetensors")
        # The embedding, because matrices may be kept in a layout of the device's own.
        table = load(single, dtype=wanted).model.embed_tokens.weight
        assert table.dtype == getattr(torch, wanted)
        assert torch.equal(table, tensors[EMBEDDING].to(table.dtype))

    def test_progress_counts_every_tensor(self, single: Path) -> None:
        calls: list[tuple[int, int]] = []
        load(single, progress=lambda done, total: calls.append((done, total)))
        count = len(load_file(single / "model.safetensors"))
        assert calls == [(done, count) for done in range(1, count + 1)]

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_a_rank_reads_its_share_and_no_more(self, single: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[int] = []
        original = Checkpoint.read

        def counting(checkpoint: Checkpoint, name: str, source: Any) -> torch.Tensor:
            tensor = original(checkpoint, name, source)
            read.append(tensor.numel())
            return tensor

        monkeypatch.setattr(Checkpoint, "read", counting)
        group = ParallelGroup(1 if size > 1 else 0, size)
        model = load(single, groups=ParallelGroups(group, group, group))
        assert sum(read) == sum(parameter.numel() for parameter in model.parameters())


class HalfLoaded(nn.Module):
    """Declares where only the first of its two rows comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = empty_parameter(2, 4)

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        yield slice_of(self.weight, f"{path}.weight", dim=0, total=1, start=0, length=1)


def test_a_parameter_that_nothing_fills_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"4 of the 8 elements of 0\.weight are loaded"):
        weight_parts(nn.Sequential(HalfLoaded()))


class TestTiedHead:
    """The head tensor present or absent, the config's flag true or false."""

    def test_present_and_untied_uses_it(self, single: Path) -> None:
        model = load(single)
        assert torch.equal(model.lm_head.weight, load_file(single / "model.safetensors")[HEAD])
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)

    def test_absent_and_untied_is_an_error(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", {HEAD: None})
        message = error_of(single)
        assert f"tensors are missing: {HEAD}" in message
        assert "tie_word_embeddings is false" in message

    def test_absent_and_tied_shares_the_embedding(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", {HEAD: None})
        edit_json(single / "config.json", tie_word_embeddings=True)
        model = load(single)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, load_file(single / "model.safetensors")[EMBEDDING])

    @pytest.mark.parametrize("equal", [True, False])
    def test_present_and_tied_uses_the_embedding(
        self, single: Path, equal: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        edit_json(single / "config.json", tie_word_embeddings=True)
        file = single / "model.safetensors"
        if equal:
            edit_tensors(file, {HEAD: load_file(file)[EMBEDDING].clone()})
        with caplog.at_level(logging.WARNING, logger="models.loader"):
            model = load(single)
        assert torch.equal(model.lm_head.weight, load_file(file)[EMBEDDING])
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == (0 if equal else 1)
        assert all(HEAD in warning and EMBEDDING in warning for warning in warnings)


class TestBlockFp8:
    """Matrices in float8 with a scale for every 32 x 40 block, of which the tiny model's edges cut some off."""

    block = (32, 40)

    def quantise(self, folder: Path) -> dict[str, torch.Tensor]:
        """Quantise all projections of a checkpoint in place; returns the values they then stand for."""
        file = folder / "model.safetensors"
        tensors = load_file(file)
        values = {}
        for name, tensor in list(tensors.items()):
            if name.endswith("proj.weight"):
                tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_fp8(tensor, self.block)
                values[name] = dequantize_block_fp8(tensors[name], tensors[f"{name}_scale_inv"], self.block)
        save_file(tensors, file)
        edit_json(
            folder / "config.json",
            quantization_config={"quant_method": "fp8", "weight_block_size": list(self.block)},
        )
        return values

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_shards_are_slices_of_the_dequantised_matrix(self, single: Path, size: int) -> None:
        values = self.quantise(single)
        for rank in range(size):
            group = ParallelGroup(rank, size)
            model = load(single, groups=ParallelGroups(group, group, group))
            mlp = model.model.layers[1].mlp
            gate, up = (values[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
            shares = (gate.chunk(size)[rank], up.chunk(size)[rank])
            assert torch.equal(mlp.gate_up_proj.weight, torch.cat(shares))
            assert torch.equal(mlp.down_proj.weight, values[DOWN].chunk(size, dim=1)[rank])

    def test_scale_of_the_wrong_shape(self, single: Path) -> None:
        self.quantise(single)
        edit_tensors(single / "model.safetensors", {f"{DOWN}_scale_inv": torch.ones(3, 3)})
        message = error_of(single)
        assert f"{DOWN}_scale_inv has shape [3, 3]" in message
        assert "need [2, 3]" in message

    def test_scale_is_missing(self, single: Path) -> None:
        self.quantise(single)
        edit_tensors(single / "model.safetensors", {f"{DOWN}_scale_inv": None})
        assert f"{DOWN}_scale_inv is missing" in error_of(single)

    def test_scales_without_a_block_size(self, single: Path) -> None:
        self.quantise(single)
        edit_json(single / "config.json", quantization_config=None)
        assert "quantization_config" in error_of(single)

    def test_other_quantisation(self, single: Path) -> None:
        self.quantise(single)
        edit_json(single / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
        assert "quant_method 'gptq'" in error_of(single)


class TestConfig:
    def test_missing_folder(self, tmp_path: Path) -> None:
        message = error_of(tmp_path / "nowhere")
        assert "nowhere: no such folder" in message
        assert "tiny-llama" in message

    def test_missing_config(self, single: Path) -> None:
        (single / "config.json").unlink()
        assert "config.json: no such file" in error_of(single)

    def test_broken_config(self, single: Path) -> None:
        (single / "config.json").write_text("{")
        assert "config.json: cannot be read as JSON" in error_of(single)

    def test_unknown_architecture(self, single: Path) -> None:
        edit_json(single / "config.json", architectures=["FooForCausalLM"])
        message = error_of(single)
        assert "'FooForCausalLM'" in message
        assert "LlamaForCausalLM, Qwen2ForCausalLM" in message

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"architectures": None}, "architectures is None"),
            ({"vocab_size": None}, "the field vocab_size is missing"),
            ({"hidden_size": "64"}, "hidden_size is '64'"),
            ({"num_attention_heads": 0}, "num_attention_heads is 0"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"sliding_window": 128}, "sliding-window"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
            ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"),
            ({"rope_parameters": [1]}, "the rotary settings are [1]; expected a JSON object"),
            ({"rope_parameters": {"rope_theta": 1}}, "the rotary setting rope_theta is 1; expected a number above 1"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 1e308}}, "factor is 1e+308; expected a number"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": float("nan")}}, "factor is nan; expected a number"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a number"),
            ({"layer_types": 3}, "layer_types is 3; expected a list"),
            ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; expected a whole number of at most 1000"),
            ({"vocab_size": 2**40}, "vocab_size is 1099511627776; expected a whole number of at most 2147483647"),
            ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ],
    )
    def test_bad_field(self, single: Path, changes: dict[str, Any], expected: str) -> None:
        (single / "generation_config.json").unlink(missing_ok=True)
        edit_json(single / "config.json", **changes)
        message = error_of(single)
        assert expected in message
        assert str(single) in message

    def test_heads_that_do_not_divide(self, single: Path) -> None:
        group = ParallelGroup(0, 3)
        message = error_of(single, groups=ParallelGroups(group, group, group))
        assert "num_key_value_heads is 2, which cannot be repeated evenly over 3 ranks" in message

    def test_older_spelling_of_the_rotary_settings(self, single: Path, originals: dict[str, Path]) -> None:
        scaling = {key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_theta", "rope_type")}
        for kind in ("rope_type", "type"):
            edit_json(
                single / "config.json",
                rope_parameters=None,
                rope_theta=LLAMA3_ROPE["rope_theta"],
                rope_scaling={**scaling, kind: "llama3"},
                dtype=None,
                torch_dtype="float16",
            )
            model, info = models.load_model(str(single))
            assert info.dtype == torch.float16
            assert torch.equal(model.model.rotary.cos_sin_PD, load(originals["single"]).model.rotary.cos_sin_PD)

    @pytest.mark.parametrize(
        ("config", "generation", "expected"),
        [(1, None, (1,)), ([1, 2], None, (1, 2)), (1, [2, 3], (2, 3)), (None, 4, (4,)), (None, None, ())],
    )
    def test_eos_ids(self, single: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
        edit_json(single / "config.json", eos_token_id=config)
        (single / "generation_config.json").write_text("{}")
        edit_json(single / "generation_config.json", eos_token_id=generation)
        assert models.load_model(str(single))[1].eos_token_ids == expected

    def test_a_model_that_memory_does_not_hold(self, single: Path) -> None:
        edit_json(single / "config.json", intermediate_size=2**31 - 1)
        assert "config.json: the model takes 4" in error_of(single)

    def test_eos_ids_outside_the_vocabulary_are_dropped(self, single: Path, caplog: pytest.LogCaptureFixture) -> None:
        (single / "generation_config.json").unlink(missing_ok=True)
        edit_json(single / "config.json", eos_token_id=[-1, 1, VOCAB_SIZE])
        assert models.load_model(str(single))[1].eos_token_ids == (1,)
        assert f"of eos_token_id (-1, 1, {VOCAB_SIZE}) only (1,) are in the vocabulary" in caplog.text

    def test_info(self, single: Path) -> None:
        _, info = models.load_model(str(single))
        assert (info.vocab_size, info.context_length, info.dtype) == (VOCAB_SIZE, 1024, torch.float32)
        assert info.architecture == "LlamaForCausalLM"

    def test_unknown_dtype_and_load_format(self, single: Path) -> None:
        assert "--dtype int4 is not one of auto, bfloat16" in error_of(single, dtype="int4")
        assert "--load-format gguf is not one of auto, dummy" in error_of(single, load_format="gguf")


class TestDummy:
    def test_needs_config_only_and_repeats(self, single: Path) -> None:
        (single / "model.safetensors").unlink()
        assert_same_weights(load(single, load_format="dummy"), load(single, load_format="dummy"))

    @pytest.mark.parametrize("preset", list(PRESETS))
    def test_presets_give_sane_logits(self, preset: str) -> None:
        model, info = models.load_model(preset)
        assert info.vocab_size >= 259
        logits = Runner(model, info).step((1, random_ids(100)))[0]
        assert logits.dtype == torch.float32
        assert 0.3 < logits.std() < 3
        # Not one token for ever: the likeliest ones differ from position to position.
        assert len(set(logits.argmax(-1).tolist())) > 30
