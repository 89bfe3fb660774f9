"""Block-fp8 checkpoints end to end, at sizes that are no multiple of the block: logits of the dequantised model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from layers.moe import Experts
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from layers.quantization import FP8_DTYPE, SCALE_SUFFIX, BlockScales, dequantize_block_fp8, quantize_block_fp8
from models import ModelError, loader
from models.hf_config import read_config
from tests.models.support import Runner, check_prefill, edit_json, make_checkpoint, random_ids

# What DeepSeek keeps in float8: all projections, of attention, dense MLPs and experts; not routers, embeddings, head.
QUANTISED = re.compile(r"(_proj(_with_mqa)?\.weight|\.w[123]\.weight|experts\.(gate_up|down)_proj)$")
# Family -> sizes of bug reports: hidden 576, intermediate 192 and 320, and one below a whole block.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 320},
    "qwen3_moe": {"moe_intermediate_size": 192, "num_experts": 4},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 4},
    "deepseek_v3": {
        "intermediate_size": 320,
        "moe_intermediate_size": 192,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 144,
    },
}


def make_fp8_checkpoint(family: str, folder: Path, *, ue8m0: bool = False, merged: bool = False) -> Any:
    """A checkpoint with its projections in block-fp8; returns the transformers model with the values they stand for."""
    sizes = {"hidden_size": 576, "num_hidden_layers": 2, **SHAPES[family]}
    reference = make_checkpoint(family, folder, **sizes)
    if merged:
        reference.save_pretrained(folder, save_original_format=False)
    file = folder / "model.safetensors"
    stored = load_file(file)
    for name, tensor in list(stored.items()):
        if QUANTISED.search(name):
            stored[name], stored[name + SCALE_SUFFIX] = quantize_block_fp8(tensor, power_of_two=ue8m0)
    save_file(stored, file, {"format": "pt"})
    edit_json(
        folder / "config.json",
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    )
    for parameter_name, parameter in reference.named_parameters():
        if QUANTISED.search(parameter_name):
            parameter.data = restored(parameter.data, ue8m0, merged)
    return reference


def restored(weight: torch.Tensor, ue8m0: bool, merged: bool) -> torch.Tensor:
    """The weight after a round trip; transformers keeps gate and up of experts as one, files keep them apart or not."""
    parts = weight.chunk(2, dim=1) if weight.ndim == 3 and weight.shape[2] == 576 and not merged else (weight,)
    return torch.cat([dequantize_block_fp8(*quantize_block_fp8(part, power_of_two=ue8m0)) for part in parts], dim=-2)


@pytest.mark.parametrize("ue8m0", [False, True], ids=["float32 scales", "ue8m0 scales"])
@pytest.mark.parametrize("family", SHAPES)
def test_parity(tmp_path: Path, family: str, ue8m0: bool) -> None:
    reference = make_fp8_checkpoint(family, tmp_path, ue8m0=ue8m0)
    check_prefill(reference, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_parity_of_merged_experts(tmp_path: Path, family: str) -> None:
    reference = make_fp8_checkpoint(family, tmp_path, merged=True)
    assert any(name.endswith("gate_up_proj" + SCALE_SUFFIX) for name in load_file(tmp_path / "model.safetensors"))
    check_prefill(reference, tmp_path)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_hold_slices_of_the_dequantised_model(tmp_path: Path, size: int) -> None:
    make_fp8_checkpoint("deepseek_v3", tmp_path)
    whole, _ = models.load_model(str(tmp_path))
    for rank in range(size):
        group = ParallelGroup(rank, size)
        part, _ = models.load_model(str(tmp_path), groups=ParallelGroups(group, group, group))
        for name, dim in (
            ("layers.1.mlp.experts.w13_E2IH", 0),
            ("layers.1.mlp.experts.w2_EHI", 0),
            ("layers.1.mlp.shared_experts.down_proj.weight", 1),
            ("layers.0.mlp.down_proj.weight", 1),
            ("layers.0.self_attn.kv_b_proj.weight", 0),
            ("layers.0.self_attn.o_proj.weight", 1),
        ):
            expected = whole.model.get_parameter(name).chunk(size, dim=dim)[rank]
            assert torch.equal(part.model.get_parameter(name), expected), name


def test_dtype_of_the_model_decides(tmp_path: Path) -> None:
    make_fp8_checkpoint("qwen3_moe", tmp_path)
    model, info = models.load_model(str(tmp_path), dtype="bfloat16")
    exact, _ = models.load_model(str(tmp_path), dtype="float32")
    assert info.dtype == torch.bfloat16
    weights = (loaded.model.layers[1].mlp.experts.w13_E2IH for loaded in (model, exact))
    low, high = weights
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, high.bfloat16())


@pytest.mark.parametrize("off_by", [(1, 0), (0, -1)])
def test_scales_off_by_one(tmp_path: Path, off_by: tuple[int, int]) -> None:
    make_fp8_checkpoint("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.2.up_proj.weight" + SCALE_SUFFIX
    assert tensors[name].shape == (2, 5)
    tensors[name] = torch.ones(2 + off_by[0], 5 + off_by[1])
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(name) + r" has shape .* need \[2, 5\]") as error:
        models.load_model(str(tmp_path))
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'; supported: 'fp8'"),
        ({"quant_method": "fp8"}, r"weight_block_size None; expected two sizes such as \[128, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        ("fp8", "quantization_config is 'fp8'; expected a JSON object"),
    ],
)
def test_unsupported_quantisation_is_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=quantization)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        models.load_model(str(tmp_path))


KEEP = ParallelGroups(moe=MoEOptions(quantization="fp8"))


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    make_fp8_checkpoint("qwen3_moe", folder)
    return folder


def experts_of(model: Any) -> Experts:
    """Of the last layer."""
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, Experts)
    return experts


def values(weight: torch.Tensor, scales: BlockScales | None) -> torch.Tensor:
    assert scales is not None
    return dequantize_block_fp8(weight, scales.values, scales.block)


@pytest.mark.parametrize(
    ("family", "ue8m0", "merged"),
    [("qwen3_moe", False, False), ("mixtral", True, False), ("deepseek_v3", True, True)],
)
def test_experts_stay_float8(tmp_path: Path, family: str, ue8m0: bool, merged: bool) -> None:
    """With the numbers of the checkpoint, and logits to the last bit those of the dequantised model."""
    make_fp8_checkpoint(family, tmp_path, ue8m0=ue8m0, merged=merged)
    plain, info = models.load_model(str(tmp_path), dtype="float32")
    kept, kept_info = models.load_model(str(tmp_path), dtype="float32", groups=KEEP)
    assert (info.expert_dtype, kept_info.expert_dtype) == (torch.float32, FP8_DTYPE)
    experts, dequantised = experts_of(kept), experts_of(plain)
    assert torch.equal(values(experts.w13_E2IH, experts.w13_scales), dequantised.w13_E2IH)
    assert torch.equal(values(experts.w2_EHI, experts.w2_scales), dequantised.w2_EHI)
    # Others do not: shared experts, dense layers and attention get the model's dtype.
    assert {parameter.dtype for name, parameter in kept.named_parameters() if ".experts." not in name} == {
        torch.float32
    }
    ids = random_ids(40)
    logits, expected = (
        Runner(model, own, max_requests=1).step((1, ids))[0] for model, own in ((kept, kept_info), (plain, info))
    )
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("merged", [False, True])
def test_ranks_hold_slices_of_kept_experts(tmp_path: Path, qwen3_moe: Path, merged: bool) -> None:
    """Of 192 columns a rank has 96 or 48, which begin within a block of 128; merged, up begins within one too."""
    if merged:
        make_fp8_checkpoint("qwen3_moe", tmp_path, merged=True)
    folder = str(tmp_path if merged else qwen3_moe)
    whole = experts_of(models.load_model(folder, dtype="float32")[0])
    gate_EIH, up_EIH = whole.w13_E2IH.chunk(2, dim=1)
    for rank, experts, columns in ((1, 2, 1), (1, 1, 2), (3, 2, 2), (0, 1, 4), (1, 1, 4), (3, 1, 4)):
        groups = ParallelGroups(
            experts=ParallelGroup(rank // columns, experts),
            expert_columns=ParallelGroup(rank % columns, columns),
            moe=MoEOptions(quantization="fp8"),
        )
        part = experts_of(models.load_model(folder, dtype="float32", groups=groups)[0])
        own = slice(part.first, part.first + part.num_local)
        share = slice(part.first_column, part.first_column + part.intermediate_size)
        w13 = torch.cat((gate_EIH[own, share], up_EIH[own, share]), dim=1)
        assert torch.equal(values(part.w13_E2IH, part.w13_scales), w13)
        assert torch.equal(values(part.w2_EHI, part.w2_scales), whole.w2_EHI[own, :, share])


def test_random_weights_stay_float8_and_are_the_same_on_every_layout(qwen3_moe: Path) -> None:
    options: dict[str, Any] = {"path": str(qwen3_moe), "load_format": "dummy", "dtype": "float32"}
    whole = experts_of(models.load_model(groups=KEEP, **options)[0])
    plain = experts_of(models.load_model(**options)[0])
    w2 = values(whole.w2_EHI, whole.w2_scales)
    # Three mantissa bits.
    assert (w2 - plain.w2_EHI).abs().max() < plain.w2_EHI.abs().max() / 16
    groups = ParallelGroups(expert_columns=ParallelGroup(1, 2), moe=KEEP.moe)
    part = experts_of(models.load_model(groups=groups, **options)[0])
    assert torch.equal(values(part.w2_EHI, part.w2_scales), w2[:, :, 96:])


def test_what_cannot_stay_float8_is_refused(tmp_path: Path, qwen3_moe: Path) -> None:
    folder = tmp_path / "qwen3_moe"
    shutil.copytree(qwen3_moe, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[name + SCALE_SUFFIX]
    save_file({**tensors, name: tensors[name].bfloat16()}, file, {"format": "pt"})
    assert models.load_model(str(folder))[1].expert_dtype == torch.float32
    with pytest.raises(
        ModelError, match=rf"model\.safetensors: tensor {name} is torch\.bfloat16 without .*leave the flag"
    ):
        models.load_model(str(folder), groups=KEEP)
    edit_json(folder / "config.json", mlp_only_layers=[0, 1])
    with pytest.raises(
        ModelError, match=r"config\.json: --quantization fp8 keeps .* this Qwen3MoeForCausalLM has none"
    ):
        models.load_model(str(folder), groups=KEEP)
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(ModelError, match="and this one has no quantization_config: leave the flag out"):
        models.load_model(str(folder), groups=KEEP)


def test_an_old_gpu_is_refused(qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(qwen3_moe)
    model = loader._build(config, KEEP, torch.bfloat16, "meta")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    capability = (8, 9)
    loader._check_quantization(model, config, "cuda")
    capability = (8, 6)
    with pytest.raises(ModelError, match=r"a GPU of compute capability 8\.6 does not convert"):
        loader._check_quantization(model, config, "cuda")
