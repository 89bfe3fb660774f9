"""What two ranks must agree on before bytes of one can lie in the memory of the other, and how their items differ."""

from __future__ import annotations

import msgspec

from disagg.base import KVArgs
from disagg.pages import Slices
from disagg.tp_plan import Leg, head_slices, heads_of, leg_between, replicated_slices, sizes_refusal

_ALIKE = (
    "model",
    "page_size",
    "kv_dtype",
    "kv_layout",
    "total_kv_head_num",
    "kv_layer_ids",
    "state_types",
    "state_head_rows",
    "aux_item_lens",
)
_FLAGS = {"model": "--model-path and the same files there", "page_size": "--page-size", "kv_dtype": "--dtype"}
_ALIKE_AT_EQUAL_SIZES = ("kv_head_num", "kv_item_lens", "state_item_lens")


class KVDescription(msgspec.Struct, frozen=True):
    """One rank's memory without its addresses; the fields are those of KVArgs."""

    model: str
    page_size: int
    kv_dtype: str
    kv_layout: str
    kv_head_num: int
    total_kv_head_num: int
    kv_layer_ids: list[int]
    kv_item_lens: list[int]
    state_types: list[str]
    state_head_rows: list[int]
    state_item_lens: list[list[int]]
    aux_item_lens: list[int]
    tp_rank: int
    tp_size: int

    @classmethod
    def of(cls, args: KVArgs) -> KVDescription:
        return cls(
            model=args.model,
            page_size=args.page_size,
            kv_dtype=args.kv_dtype,
            kv_layout=args.kv_layout,
            kv_head_num=args.kv_head_num,
            total_kv_head_num=args.total_kv_head_num,
            kv_layer_ids=args.kv_layer_ids,
            kv_item_lens=args.kv_item_lens,
            state_types=args.state_types,
            state_head_rows=[component.head_rows for component in args.state],
            state_item_lens=[component.item_lens for component in args.state],
            aux_item_lens=args.aux_item_lens,
            tp_rank=args.tp_rank,
            tp_size=args.tp_size,
        )

    @property
    def heads(self) -> range:
        return heads_of(self.tp_rank, self.tp_size, self.total_kv_head_num)

    def split_items(self) -> list[tuple[str, int, list[int]]]:
        """Name, rows of an item and item lengths of the components whose rows are made of this rank's heads."""
        split = [("kv", self.page_size, self.kv_item_lens)]
        for name, rows, item_lens in zip(self.state_types, self.state_head_rows, self.state_item_lens, strict=True):
            if rows:
                split.append((f"state {name}", rows, item_lens))
        return split

    def difference(self, other: KVDescription, own: str, others: str, fields: tuple[str, ...]) -> str | None:
        """One line that names the first differing field with both values and its flag, None if all agree."""
        for name in fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                advice = f"; start both servers with the same {_FLAGS[name]}" if name in _FLAGS else ""
                return f"{name} differs: {own} has {mine!r}, {others} has {theirs!r}{advice}"
        return None


def refusal(own: KVDescription, other: KVDescription, own_name: str, other_name: str) -> str | None:
    """Why bytes cannot go between the two ranks, with both values; None if they can. Either may be the prefill rank."""
    found = own.difference(other, own_name, other_name, _ALIKE)
    if found:
        return found
    if own.tp_size == other.tp_size:
        return own.difference(other, own_name, other_name, _ALIKE_AT_EQUAL_SIZES)
    found = sizes_refusal(own.tp_size, other.tp_size)
    if found:
        return f"{own_name} and {other_name}: {found}"
    for description, name in ((own, own_name), (other, other_name)):
        if description.kv_head_num != len(description.heads):
            return (
                f"kv_head_num: {name} has {description.kv_head_num} with tp_size {description.tp_size}, "
                f"{description.total_kv_head_num} heads in all make {len(description.heads)}"
            )
    for rows, mine, theirs in zip(own.state_head_rows, own.state_item_lens, other.state_item_lens, strict=True):
        if not rows and mine != theirs:
            return f"state_item_lens differs: {own_name} has {mine!r}, {other_name} has {theirs!r}"
    for (what, rows, mine), (_, _, theirs) in zip(own.split_items(), other.split_items(), strict=True):
        for length, other_length in zip(mine, theirs, strict=True):
            if length * other.kv_head_num != other_length * own.kv_head_num:
                return (
                    f"{what} items differ: {own_name} has {length} bytes for {own.kv_head_num} heads, "
                    f"{other_name} has {other_length} for {other.kv_head_num}"
                )
            if own.kv_head_num != other.kv_head_num and length % (rows * own.kv_head_num):
                return f"{what} item of {length} bytes is not {rows} rows of {own.kv_head_num} heads"
    return None


def leg_of(source: KVDescription, target: KVDescription) -> Leg:
    return leg_between(source.tp_rank, source.tp_size, target.tp_rank, target.tp_size, target.total_kv_head_num)


def component_slices(source: KVDescription, target: KVDescription) -> list[Slices]:
    """Of the KV pages and then of each state component: which bytes of an item go from `source` to `target`."""
    leg = leg_of(source, target)
    slices = [head_slices(leg, source.heads, target.heads, source.page_size, source.kv_item_lens)]
    for rows, item_lens in zip(source.state_head_rows, source.state_item_lens, strict=True):
        if rows:
            slices.append(head_slices(leg, source.heads, target.heads, rows, item_lens))
        else:
            slices.append(replicated_slices(leg, item_lens))
    return slices
