"""From a folder or preset to a model on a device: the config, the empty model, then its weights slice by slice.

A weight goes from the file's slice straight into this rank's parameter; no second copy of the model is ever in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from layers.host_memory import available_memory
from layers.moe import Experts
from layers.parallel import SINGLE, ParallelGroups
from layers.quantization import SCALE_SUFFIX
from layers.weights import HasWeightParts, WeightPart, whole
from models import block_fp8, presets
from models.base import ModelInfo
from models.checkpoint import Checkpoint
from models.decoder import DecoderLM
from models.dummy import dummy_tensor
from models.errors import ModelError
from models.hf_config import DTYPES, HFConfig, eos_ids, read_config
from models.registry import model_class

logger = logging.getLogger(__name__)

# Called with (weights loaded so far, all weights), counted in parts of parameters.
Progress = Callable[[int, int], None]

# Tensors that some exporters write and that no forward pass here needs.
_HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.[kv]_scale|\.kv_scale)$|^(model\.)?mtp\.")
# Fields of config.json that say nothing of the model.
_OF_THE_EXPORT = ("_name_or_path", "transformers_version")
# The first GPUs with instructions for float8.
_FP8_CAPABILITY = (8, 9)
_LISTED = 5  # names listed in one error line


def load_model(
    path: str,
    *,
    load_format: str = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    groups: ParallelGroups = SINGLE,
    progress: Progress | None = None,
) -> tuple[DecoderLM, ModelInfo]:
    """This rank's model with its weights, in evaluation mode.

    path: a checkpoint folder or the name of a preset. load_format: "auto" (safetensors) or "dummy" (random, from
    config.json alone); presets are always dummy. dtype: "auto" takes the checkpoint's. ModelError for every fault of
    the checkpoint or the layout.
    """
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"--load-format {load_format} is not one of auto, dummy")
    config = _config(path)
    chosen = _dtype(config, dtype)
    if torch.device(device).type == "cpu":
        _check_memory(_build(config, groups, chosen, "meta"), config)
    model = _build(config, groups, chosen, device)
    parts = weight_parts(model)
    if presets.has_random_weights(path, load_format):
        _load_dummy(parts, config, progress)
    else:
        checkpoint = Checkpoint(Path(path))
        _load_checkpoint(checkpoint, model, _as_stored(parts, checkpoint), config, progress)
    return model.eval(), _info(model, config, chosen)


def model_digest(path: str) -> str:
    """The same for two paths with the same config.json or preset. ModelError as `load_model`."""
    values = {name: value for name, value in _config(path).values.items() if name not in _OF_THE_EXPORT}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def progress_bar(description: str = "Loading weights") -> Progress:
    """A bar on standard error that closes itself when complete; nothing where that is not a terminal."""
    bar = tqdm(desc=description, unit=" tensors", dynamic_ncols=True, disable=None)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return update


def _config(path: str) -> HFConfig:
    preset = presets.resolve(path)
    if preset is not None:
        return HFConfig(preset, path, eos_ids(preset["eos_token_id"], path))
    if not Path(path).is_dir():
        names = ", ".join(presets.PRESETS)
        raise ModelError(f"--model-path {path}: no such folder (names are not downloaded), nor a preset: {names}")
    return read_config(Path(path))


def _dtype(config: HFConfig, dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return config.dtype
    if dtype not in DTYPES:
        raise ModelError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _info(model: DecoderLM, config: HFConfig, dtype: torch.dtype) -> ModelInfo:
    return ModelInfo(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        context_length=config.rope.max_positions,
        eos_token_ids=config.eos_token_ids,
        dtype=dtype,
        kv_spec=model.kv_spec,
        total_kv_heads=model.make_kv_spec(config, SINGLE).num_kv_heads,
        expert_dtype=next((experts.w2_EHI.dtype for experts in _experts(model)), None),
    )


def _build(config: HFConfig, groups: ParallelGroups, dtype: torch.dtype, device: str | torch.device) -> DecoderLM:
    """The model with uninitialised parameters, made on the device and in the dtype they stay in."""
    family = model_class(config.architecture, config.source)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = family(config, groups)
        if groups.moe.quantization is not None:
            _check_quantization(model, config, device)
        return model
    except ModelError:
        raise
    except ValueError as error:
        raise config.error(str(error)) from None
    finally:
        torch.set_default_dtype(before)


def _check_memory(model: nn.Module, config: HFConfig) -> None:
    """ModelError when the machine does not hold this rank's part, which the kernel would only notice while it loads."""
    wanted = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    free = available_memory()
    if wanted > free:
        raise ModelError(
            f"{config.source}: the model takes {wanted / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of memory are free: "
            "use a smaller one or a --dtype of fewer bytes, or split it over machines"
        )


def _experts(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def _check_quantization(model: DecoderLM, config: HFConfig, device: str | torch.device) -> None:
    """ModelError where no expert can stay float8, by what the checkpoint has or by what the device can compute."""
    flag = "--quantization fp8 keeps the routed experts of a block-fp8 checkpoint in float8"
    if config.fp8_block is None:
        raise config.error(f"{flag}, and this one has no quantization_config: leave the flag out")
    if not _experts(model):
        raise config.error(f"{flag}, and this {config.architecture} has none: leave the flag out")
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise ModelError(
            f"{flag}, which a GPU of compute capability {major}.{minor} does not convert (8.9 and above do): leave the "
            "flag out"
        )


def weight_parts(model: nn.Module) -> dict[str, list[WeightPart]]:
    """Checkpoint tensor -> what becomes of it; every element of every parameter is filled once."""
    parts: dict[str, list[WeightPart]] = defaultdict(list)
    filled: dict[int, int] = defaultdict(int)
    for path, module in model.named_modules():
        if isinstance(module, HasWeightParts):
            own = list(module.weight_parts(path))
        else:
            named = module.named_parameters(recurse=False)
            own = [whole(parameter, f"{path}.{name}" if path else name) for name, parameter in named]
        for part in own:
            parts[part.name].append(part)
            filled[id(part.parameter)] += part.target.numel()
            if part.scales is not None:
                filled[id(part.scales.parameter)] += part.scales.target.numel()
    for name, parameter in model.named_parameters():
        if filled[id(parameter)] != parameter.numel():
            raise AssertionError(f"{filled[id(parameter)]} of the {parameter.numel()} elements of {name} are loaded")
    return parts


def _as_stored(parts: dict[str, list[WeightPart]], checkpoint: Checkpoint) -> dict[str, list[WeightPart]]:
    """The same parts by the tensors that this checkpoint has, where it has them under an alternative."""
    stored: dict[str, list[WeightPart]] = defaultdict(list)
    for name, uses in parts.items():
        for part in uses:
            other = next((place for place in part.alternatives if place.name in checkpoint), None)
            if other is not None and name not in checkpoint:
                part = replace(part, name=other.name, shape=other.shape, source=other.source)
            stored[part.name].append(part)
    return stored


def _load_dummy(parts: dict[str, list[WeightPart]], config: HFConfig, progress: Progress | None) -> None:
    def fill(name: str) -> None:
        uses = [part for part in parts[name] if not part.is_empty]
        if not uses:
            return
        tensor = dummy_tensor(name, uses[0].shape)
        if uses[0].scales is not None:
            block_fp8.keep_quantized(tensor, uses, config)
            return
        for part in uses:
            part.target.copy_(tensor[tuple(slice(start, stop) for start, stop in part.source)])

    # Drawing normal numbers uses one core a tensor, and a large model has tens of billions of them.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done, _ in enumerate(pool.map(fill, parts), start=1):
            if progress is not None:
                progress(done, len(parts))


def _load_checkpoint(
    checkpoint: Checkpoint,
    model: DecoderLM,
    parts: dict[str, list[WeightPart]],
    config: HFConfig,
    progress: Progress | None,
) -> None:
    scales = _check_names(checkpoint, model, parts, config)
    for name, uses in parts.items():
        shape = checkpoint.shape(name)
        if shape != uses[0].shape:
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} has shape {list(shape)}; "
                f"{config.source} asks for {list(uses[0].shape)}"
            )
    for done, (name, uses) in enumerate(parts.items(), start=1):
        for part in uses:
            if part.is_empty:
                continue
            if part.scales is not None:
                block_fp8.keep(checkpoint, part, scales.get(name), config)
                continue
            if name in scales:
                tensor = block_fp8.read_dequantized(checkpoint, part, scales[name], config)
            else:
                tensor = _read_plain(checkpoint, part)
            part.target.copy_(tensor.reshape(part.target.shape))
        if progress is not None:
            progress(done, len(parts))
    for name, other in model.tied_tensors.items():
        if name in checkpoint and other in checkpoint and not _same_values(checkpoint, name, other):
            logger.warning(
                "%s: tie_word_embeddings is true but %s differs from %s; the latter is used for both",
                config.source,
                name,
                other,
            )


def _check_names(
    checkpoint: Checkpoint, model: DecoderLM, parts: dict[str, list[WeightPart]], config: HFConfig
) -> dict[str, str]:
    """Account for every tensor of the checkpoint; returns quantised tensor -> its block scales.

    ModelError for wanted tensors that are missing and present ones that nothing here knows.
    """
    scales = {name: name + SCALE_SUFFIX for name in parts if name + SCALE_SUFFIX in checkpoint}
    known = {*parts, *scales.values(), *model.tied_tensors}
    missing = [name for name in parts if name not in checkpoint]
    rest = [name for name in checkpoint.names if name not in known]
    harmless = [name for name in rest if _is_harmless(name, config)]
    unknown = [name for name in rest if name not in set(harmless)]
    faults = []
    if missing:
        faults.append(f"tensors are missing: {_some(missing)}")
    if unknown:
        faults.append(f"tensors are unknown: {_some([f'{name} ({checkpoint.path(name).name})' for name in unknown])}")
    if faults:
        hint = "; tie_word_embeddings is false, so the head has to be there" if missing == ["lm_head.weight"] else ""
        raise ModelError(f"{checkpoint.folder}: {' and '.join(faults)}{hint}")
    if harmless:
        logger.info("%s: skipped tensors that are not needed: %s", checkpoint.folder, _some(harmless))
    return scales


def _is_harmless(name: str, config: HFConfig) -> bool:
    if _HARMLESS.search(name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None:
        return False
    # Draft layers for speculation follow the model's own.
    return 0 <= int(layer[1]) - config.num_layers < config.integer("num_nextn_predict_layers", 0, minimum=0)


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:_LISTED])
    return listed if len(names) <= _LISTED else f"{listed} and {len(names) - _LISTED} more"


def _read_plain(checkpoint: Checkpoint, part: WeightPart) -> torch.Tensor:
    stored = checkpoint.dtype(part.name)
    if stored.itemsize == 1 and part.parameter.dtype != stored:
        raise ModelError(
            f"{checkpoint.path(part.name)}: tensor {part.name} is {stored} but {part.name}{SCALE_SUFFIX} is missing"
        )
    return checkpoint.read(part.name, part.source)


def _same_values(checkpoint: Checkpoint, name: str, other: str) -> bool:
    shape = checkpoint.shape(name)
    if shape != checkpoint.shape(other):
        return False
    span = tuple((0, size) for size in shape)
    return torch.equal(checkpoint.read(name, span), checkpoint.read(other, span))
