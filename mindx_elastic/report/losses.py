"""The loss over the steps, across all restarts: what the job has kept, what it did again, and the seams. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindx_elastic.agent.progress_log import Piece

__all__ = ["Losses", "Seam", "find_losses"]

Point = tuple[int, float]
"""Step and loss."""


@dataclass(frozen=True)
class Seam:
    """Where the steps go on behind an interruption."""

    step: int
    """The last one that was not done again."""
    done_again: int
    """How many known steps were."""


@dataclass(frozen=True)
class Losses:
    kept: Sequence[Sequence[Point]]
    """By part of the run, in the order of the steps. What follows a seam begins with the point in front of it, so that
    the line has no gap."""
    redone: Sequence[Sequence[Point]]
    """What was done again: the steps of each part behind the seam that follows, with the point in front of them."""
    seams: Sequence[Seam]
    num_not_finite: int


def find_losses(pieces: Iterable[Piece]) -> Losses:
    """`pieces`: in the order in which they began. Those of another agent are left out where a later one has begun anew:
    another run, in the same folder."""
    parts: list[list[Point]] = []
    num_not_finite = 0
    agent = ""
    for piece in pieces:
        known = [(step, loss) for _, step, loss in piece.points if loss is not None]
        if not known:
            continue
        if piece.agent != agent and known[0][0] <= 1:
            parts, num_not_finite = [], 0
        agent = piece.agent
        num_not_finite += sum(not math.isfinite(loss) for _, loss in known)
        parts += _rising(known)
    return _join(parts, num_not_finite)


def _rising(points: Sequence[Point]) -> list[list[Point]]:
    """Cut where the steps go back: a recovery in place."""
    parts = [[points[0]]]
    for before, point in itertools.pairwise(points):
        if point[0] <= before[0]:
            parts.append([])
        parts[-1].append(point)
    return parts


def _join(parts: Sequence[list[Point]], num_not_finite: int) -> Losses:
    kept: list[list[Point]] = []
    redone: list[list[Point]] = []
    seams: list[Seam] = []
    limit = math.inf  # the first step of all parts that follow
    for number in range(len(parts) - 1, -1, -1):
        points = parts[number]
        own = [point for point in points if point[0] < limit]
        again = points[len(own) :]
        if again:
            redone.append([*own[-1:], *again])
        if number + 1 < len(parts):
            seams.append(Seam(parts[number + 1][0][0] - 1, len(again)))
        limit = min(limit, points[0][0])
        if own:
            if kept:
                kept[-1] = [own[-1], *kept[-1]]
            kept.append(own)
    finite = [[point for point in part if math.isfinite(point[1])] for part in reversed(kept)]
    lost = [[point for point in part if math.isfinite(point[1])] for part in reversed(redone)]
    return Losses([part for part in finite if part], [part for part in lost if part], seams[::-1], num_not_finite)
