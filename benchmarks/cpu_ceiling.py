"""Decode tokens/s of a dense model's linear layers alone, in plain torch on the CPU: what a server is compared with.

    python benchmarks/cpu_ceiling.py --streams 1 8 32
    python benchmarks/cpu_ceiling.py --packed            # the same products by this project's packed kernel

A step is one product of `streams` rows with every linear layer of the model and with the LM head, in order, in bfloat16
with random weights of the model's shapes (merged query/key/value and gate/up, as the model has them). Everything else
(attention, norms, sampling, scheduling, HTTP) is left out.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from layers.embedding import LMHead
from layers.kernels.cpu import PackedWeight
from layers.linear import Linear
from layers.parallel import SINGLE
from models.hf_config import read_config
from models.registry import model_class
from server import default_model

_MIN_STEPS = 10


@functools.cache
def linear_shapes(model_path: str) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer of the checkpoint folder's model, in order, the LM head last."""
    config = read_config(Path(model_path))
    with torch.device("meta"):
        model = model_class(config.architecture, config.source)(config, SINGLE)
    layers = [module for module in model.modules() if isinstance(module, (Linear, LMHead))]
    return [(layer.weight.shape[0], layer.weight.shape[1]) for layer in layers]


@functools.cache
def _weights(model_path: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in linear_shapes(model_path)]


def tokens_per_second(model_path: str, streams: int, *, seconds: float = 1.0, packed: bool = False) -> float:
    """`streams` over the median time of a step, measured for `seconds` on torch's current number of threads.

    packed: by `PackedWeight` instead of torch; ValueError where this machine has no such kernel.
    """
    weights = _weights(model_path)
    products: list[Callable[[torch.Tensor], torch.Tensor]]
    if packed:
        if not all(PackedWeight.accepts(weight) for weight in weights):
            raise ValueError("--packed: no packed kernel for these weights on this machine")
        products = [PackedWeight(weight).linear for weight in weights]
    else:
        products = [functools.partial(F.linear, weight=weight) for weight in weights]
    inputs = {weight.shape[1]: torch.randn(streams, weight.shape[1]).bfloat16() for weight in weights}
    steps = [(product, inputs[weight.shape[1]]) for product, weight in zip(products, weights, strict=True)]
    times: list[float] = []
    with torch.inference_mode():
        for product, x in steps:
            product(x)
        end = time.perf_counter() + seconds
        while len(times) < _MIN_STEPS or time.perf_counter() < end:
            start = time.perf_counter()
            for product, x in steps:
                product(x)
            times.append(time.perf_counter() - start)
    return streams / statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-path", help="checkpoint folder; by default the model that launch.py serves by default")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="rows a step; default 1 8 32")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--repeat", type=int, default=3, help="rounds over all stream counts; default %(default)s")
    parser.add_argument("--packed", action="store_true", help="use this project's kernel instead of torch")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    model_path = args.model_path or str(default_model.ensure())
    best: dict[int, float] = {}
    # Rounds, not one long run a count: other work on the machine then falls on all of them.
    for _ in range(args.repeat):
        for streams in args.streams:
            rate = tokens_per_second(model_path, streams, packed=args.packed)
            best[streams] = max(rate, best.get(streams, 0.0))
    for streams, rate in best.items():
        print(f"{streams:4d} streams  {rate:8.1f} tokens/s  {1000 * streams / rate:7.2f} ms a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
