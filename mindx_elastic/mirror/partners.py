"""Decides which ranks keep copies of which ranks' files. Pure; the same result on every rank."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count_nodes", "partners_of", "sources_of"]


def partners_of(rank: int, nodes: Sequence[str], copies: int) -> list[int]:
    """The ranks that keep a copy of `rank`'s files, so that with its own these lie on `copies` different nodes.

    `nodes`: the name of each rank's node. The nodes stand in a circle, in the order of their lowest ranks; the copies
    go to the ranks at the same place on the next ``copies - 1`` nodes (where a node has fewer ranks: modulo). With
    fewer nodes than `copies` there are as many copies as there are nodes.
    """
    groups = _groups(nodes)
    own = next(index for index, group in enumerate(groups) if rank in group)
    place = groups[own].index(rank)
    others = [groups[(own + distance) % len(groups)] for distance in range(1, min(copies, len(groups)))]
    return [group[place % len(group)] for group in others]


def sources_of(rank: int, nodes: Sequence[str], copies: int) -> list[int]:
    """The ranks whose files `rank` keeps copies of."""
    return [other for other in range(len(nodes)) if rank in partners_of(other, nodes, copies)]


def count_nodes(nodes: Sequence[str]) -> int:
    """How many different nodes there are."""
    return len(set(nodes))


def _groups(nodes: Sequence[str]) -> list[list[int]]:
    """The ranks of each node, in order."""
    groups: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        groups.setdefault(node, []).append(rank)
    return list(groups.values())
