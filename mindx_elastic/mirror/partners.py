"""Decides which ranks keep copies of which ranks' files. Pure; the same result on every rank."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["all_partners"]


def all_partners(nodes: Sequence[str], copies: int) -> list[list[int]]:
    """For each rank those that keep a copy of its files, so that with its own these are on `copies` different nodes.

    `nodes`: the name of each rank's node. The nodes stand in a circle, in the order of their lowest ranks; the copies
    go to the ranks at the same place on the next ``copies - 1`` nodes (where a node has fewer ranks: modulo). With
    fewer nodes than `copies` there are as many copies as there are nodes.
    """
    groups: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        groups.setdefault(node, []).append(rank)
    circle = list(groups.values())
    found: list[list[int]] = [[] for _ in nodes]
    for number, group in enumerate(circle):
        others = [circle[(number + distance) % len(circle)] for distance in range(1, min(copies, len(circle)))]
        for place, rank in enumerate(group):
            found[rank] = [other[place % len(other)] for other in others]
    return found
