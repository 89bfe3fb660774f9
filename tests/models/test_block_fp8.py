"""Block-fp8 checkpoints end to end, at sizes that are no multiple of the block: logits of the dequantised model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from layers.parallel import ParallelGroup, ParallelGroups
from layers.quantization import SCALE_SUFFIX, dequantize_block_fp8, quantize_block_fp8
from models import ModelError
from tests.models.support import check_prefill, edit_json, make_checkpoint

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
def test_unsupported_quantisation_is_refused_before_loading(tmp_path: Path, quantization: Any, message: str) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=quantization)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        models.model_info(str(tmp_path))
