"""Where the copies of experts go so that ranks have even work: pure functions of how many rows each expert gets.

The problem: E logical experts with loads, P >= E physical places, the same number on each of R ranks. Give every expert
at least one place and the busiest more, a copy taking an equal part of its expert's load, so that the most loaded rank
has as little as possible. Exact answers are hard to find; these are the usual greedy ones. Where experts are chosen by
groups, and ranks lie on several hosts, keeping a group on one host spares traffic between hosts: that is planned first.

All ties go to the lower number, so equal inputs give equal plans on every rank.

Shape letters: E logical experts, P physical experts, R ranks, N hosts, G groups of experts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_packing(loads: Sequence[float], num_packs: int) -> list[int]:
    """[items] -> [items]: the pack of each item, of num_packs packs with equally many items and even total loads.

    The heaviest item left goes to the lightest pack with room. ValueError when the items do not divide.
    """
    if len(loads) % num_packs:
        raise ValueError(f"{len(loads)} items do not divide into {num_packs} packs of one size")
    room = len(loads) // num_packs
    packs = [0] * len(loads)
    lightest = [(0.0, pack, 0) for pack in range(num_packs)]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        total, pack, count = heapq.heappop(lightest)
        packs[item] = pack
        if count + 1 < room:
            heapq.heappush(lightest, (total + loads[item], pack, count + 1))
    return packs


def replicate(loads: Sequence[float], num_physical: int, most_copies: int) -> list[int]:
    """[E] -> [E]: copies of each expert, num_physical in all, at most most_copies of one.

    Each further copy goes to the expert whose copies carry the most. ValueError where that many do not fit.
    """
    count = len(loads)
    if not count <= num_physical <= count * most_copies:
        raise ValueError(f"{count} experts cannot have {num_physical} copies with 1 to {most_copies} each")
    copies = [1] * count
    heaviest = [(-load, expert) for expert, load in enumerate(loads) if most_copies > 1]
    heapq.heapify(heaviest)
    for _ in range(num_physical - count):
        _, expert = heapq.heappop(heaviest)
        copies[expert] += 1
        if copies[expert] < most_copies:
            heapq.heappush(heaviest, (-loads[expert] / copies[expert], expert))
    return copies


def plan_global(loads: Sequence[float], num_physical: int, num_ranks: int) -> list[int]:
    """[E] -> [P]: the logical expert at each physical place; place p is on rank p // (P / R)."""
    # A second copy on one rank would spread nothing.
    copies = replicate(loads, num_physical, max(num_ranks, -(-num_physical // len(loads))))
    items = [expert for expert in range(len(loads)) for _ in range(copies[expert])]
    ranks = balanced_packing([loads[expert] / copies[expert] for expert in items], num_ranks)
    return [
        expert for rank in range(num_ranks) for expert, its_rank in zip(items, ranks, strict=True) if its_rank == rank
    ]


def plan_hierarchical(
    loads: Sequence[float], num_physical: int, num_ranks: int, num_hosts: int, num_groups: int
) -> list[int]:
    """The same with each group's experts on one host: groups to hosts, copies within a host, copies to its ranks.

    loads [E] with the experts of a group side by side. ValueError when groups, ranks or places do not divide.
    """
    for total, what in ((num_groups, "groups of experts"), (num_ranks, "ranks"), (num_physical, "physical experts")):
        if total % num_hosts:
            raise ValueError(f"{total} {what} do not divide into {num_hosts} hosts")
    if len(loads) % num_groups:
        raise ValueError(f"{len(loads)} experts do not divide into {num_groups} groups")
    size = len(loads) // num_groups
    members = [range(group * size, (group + 1) * size) for group in range(num_groups)]
    hosts = balanced_packing([sum(loads[expert] for expert in group) for group in members], num_hosts)
    plan: list[int] = []
    for host in range(num_hosts):
        experts = [
            expert for group, its_host in zip(members, hosts, strict=True) if its_host == host for expert in group
        ]
        local = plan_global([loads[expert] for expert in experts], num_physical // num_hosts, num_ranks // num_hosts)
        plan += [experts[index] for index in local]
    return plan


def plan_placement(
    loads: Sequence[float], num_physical: int, num_ranks: int, num_hosts: int = 1, num_groups: int = 1
) -> list[int]:
    """[E] -> [P]: by hosts where groups and ranks divide into them, otherwise over all ranks at once."""
    if num_hosts > 1 and num_groups % num_hosts == 0 and num_ranks % num_hosts == 0:
        return plan_hierarchical(loads, num_physical, num_ranks, num_hosts, num_groups)
    return plan_global(loads, num_physical, num_ranks)


def keep_in_place(old: Sequence[int], new: Sequence[int], num_ranks: int) -> list[int]:
    """[P], [P] -> [P]: `new`, each rank's experts ordered so that those it has already keep their places."""
    per_rank = len(new) // num_ranks
    result: list[int] = []
    for rank in range(num_ranks):
        span = slice(rank * per_rank, (rank + 1) * per_rank)
        wanted, kept = list(new[span]), list[int | None]()
        for expert in old[span]:
            stays = expert in wanted
            kept.append(expert if stays else None)
            if stays:
                wanted.remove(expert)
        result += [wanted.pop(0) if expert is None else expert for expert in kept]
    return result


def moves(old: Sequence[int], new: Sequence[int], num_ranks: int) -> list[tuple[int, int]]:
    """[P], [P] -> (source place, target place) of every place whose expert changes.

    The source is a place that had the expert: one on the target's own rank if there is one, else the holders in turn,
    so that no rank sends all copies.
    """
    per_rank = len(new) // num_ranks
    holders: dict[int, list[int]] = {}
    for place, expert in enumerate(old):
        holders.setdefault(expert, []).append(place)
    sent = [0] * num_ranks
    result = []
    for target, expert in enumerate(new):
        if old[target] == expert:
            continue
        rank = target // per_rank
        own = [place for place in holders[expert] if place // per_rank == rank]
        source = own[0] if own else min(holders[expert], key=lambda place: (sent[place // per_rank], place))
        if not own:
            sent[source // per_rank] += 1
        result.append((source, target))
    return result
