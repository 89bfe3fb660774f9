"""Shards of linear layers: what each rank takes, and that together they are the whole layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layers.embedding import LMHead, VocabEmbedding
from layers.linear import ColumnLinear, Linear, MergedColumnLinear, QKVLinear, RowLinear, kv_head_share
from layers.parallel import ParallelGroup, ParallelGroups
from tests.models.thread_group import run_ranks


def fill(layer: nn.Module, tensors: dict[str, torch.Tensor], path: str) -> None:
    """Load the layer at `path` from named whole tensors."""
    for parameter in layer.parameters():
        parameter.fill_(float("nan"))
    for part in layer.weight_parts(path):
        assert tuple(tensors[part.name].shape) == part.shape
        part.target.copy_(tensors[part.name][tuple(slice(start, stop) for start, stop in part.source)])
    assert not any(parameter.isnan().any() for parameter in layer.parameters())


def named(*shapes: tuple[str, int, int], bias: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, rows, columns in shapes:
        tensors[f"block.{name}.weight"] = torch.randn(rows, columns, generator=generator)
        if bias:
            tensors[f"block.{name}.bias"] = torch.randn(rows, generator=generator)
    return tensors


def apply(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, tensors[f"block.{name}.weight"], tensors.get(f"block.{name}.bias"))


def groups(size: int) -> list[ParallelGroup]:
    return [ParallelGroup(rank, size) for rank in range(size)]


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    tensors = named(("proj", 6, 4), bias=bias)
    layer = Linear(4, 6, bias)
    fill(layer, tensors, "block.proj")
    x = torch.randn(3, 4)
    assert torch.equal(layer(x), apply(tensors, "proj", x))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_columns(size: int) -> None:
    tensors = named(("a", 8, 5), ("b", 4, 5))
    x = torch.randn(3, 5)
    outputs = []
    for group in groups(size):
        layer = MergedColumnLinear(5, (8, 4), ("a", "b"), group, bias=True)
        fill(layer, tensors, "block.merged")
        outputs.append(layer(x).split(layer.shares, dim=-1))
    for index, name in enumerate(("a", "b")):
        whole = torch.cat([output[index] for output in outputs], dim=-1)
        torch.testing.assert_close(whole, apply(tensors, name, x))


def test_column_is_named_by_its_path() -> None:
    tensors = named(("proj", 8, 5))
    for group in groups(2):
        layer = ColumnLinear(5, 8, "proj", group, bias=True)
        fill(layer, tensors, "block.proj")
        assert torch.equal(layer.weight, tensors["block.proj.weight"].chunk(2)[group.rank])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_shares_add_up(size: int, bias: bool) -> None:
    tensors = named(("proj", 6, 8), bias=bias)
    x = torch.randn(3, 8)

    def work(groups: ParallelGroups) -> torch.Tensor:
        group = groups.dense
        layer = RowLinear(8, 6, group, bias)
        fill(layer, tensors, "block.proj")
        return layer(x.chunk(size, dim=-1)[group.rank])

    for out in run_ranks(size, work):
        torch.testing.assert_close(out, apply(tensors, "proj", x))


@pytest.mark.parametrize(
    ("size", "kv_heads", "expected"),
    [
        (1, 2, [(2, 0)]),
        (2, 2, [(1, 0), (1, 1)]),
        (4, 2, [(1, 0), (1, 0), (1, 1), (1, 1)]),
        (4, 1, [(1, 0)] * 4),
        (2, 4, [(2, 0), (2, 2)]),
    ],
)
def test_kv_heads_are_split_or_repeated(size: int, kv_heads: int, expected: list[tuple[int, int]]) -> None:
    assert [kv_head_share(kv_heads, group) for group in groups(size)] == expected
    head_dim, hidden = 3, 7
    tensors = named(
        ("q_proj", 4 * head_dim, hidden),
        ("k_proj", kv_heads * head_dim, hidden),
        ("v_proj", kv_heads * head_dim, hidden),
    )
    x = torch.randn(2, hidden)
    for group, (count, first) in zip(groups(size), expected, strict=True):
        layer = QKVLinear(hidden, 4, kv_heads, head_dim, group, bias=True)
        fill(layer, tensors, "block.qkv_proj")
        q, k, v = layer(x).split(layer.shares, dim=-1)
        torch.testing.assert_close(q, apply(tensors, "q_proj", x).chunk(size, dim=-1)[group.rank])
        heads = slice(first * head_dim, (first + count) * head_dim)
        torch.testing.assert_close(k, apply(tensors, "k_proj", x)[:, heads])
        torch.testing.assert_close(v, apply(tensors, "v_proj", x)[:, heads])


def test_sizes_that_do_not_divide() -> None:
    group = ParallelGroup(0, 4)
    with pytest.raises(ValueError, match="up_proj size is 6, which does not divide into 4 ranks"):
        MergedColumnLinear(5, (8, 6), ("gate_proj", "up_proj"), group)
    with pytest.raises(ValueError, match="num_key_value_heads is 3, which cannot be repeated evenly over 4 ranks"):
        QKVLinear(5, 4, 3, 8, group)
    with pytest.raises(ValueError, match="the input of a row-split layer is 6, which does not divide into 4 ranks"):
        RowLinear(6, 5, group)


@pytest.mark.parametrize(("vocab", "sizes"), [(10, [3, 3, 3, 1]), (9, [3, 3, 3, 0]), (8, [2, 2, 2, 2])])
def test_vocabulary_is_split_without_padding_rows(vocab: int, sizes: list[int]) -> None:
    tensors = {"embed.weight": torch.randn(vocab, 5)}
    tables = []
    for group in groups(4):
        layer = VocabEmbedding(vocab, 5, group)
        fill(layer, tensors, "embed")
        tables.append(layer.weight)
    assert [table.shape[0] for table in tables] == sizes
    assert torch.equal(torch.cat(tables), tensors["embed.weight"])


def test_tied_head_shares_the_weight_and_loads_nothing() -> None:
    embedding = VocabEmbedding(10, 5, ParallelGroup())
    fill(embedding, {"embed.weight": torch.randn(10, 5)}, "embed")
    head = LMHead(10, 5, ParallelGroup(), tied_to=embedding)
    assert head.weight is embedding.weight
    assert list(head.weight_parts("lm_head")) == []
    x = torch.randn(2, 5)
    assert torch.equal(head(x), x @ embedding.weight.T)
    assert head(x).dtype == torch.float32
