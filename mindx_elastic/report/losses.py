"""The loss over the steps, across all restarts: one curve, and where the job went on in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindx_elastic.agent.progress_log import ProgressPiece

__all__ = ["Losses", "find_losses"]


@dataclass(frozen=True)
class Losses:
    points: Sequence[tuple[int, float]]
    """Step and loss, in the order of the steps; of a step that was done again what the second time gave."""
    seams: Sequence[int]
    """The steps from which the job was resumed after an interruption."""
    num_not_finite: int


def find_losses(pieces: Iterable[ProgressPiece]) -> Losses:
    """`pieces`: in the order in which they began. Those of another agent are left out where a later one has started
    over: another run, in the same folder."""
    found: dict[int, float] = {}
    seams: list[int] = []
    agent = ""
    for piece in pieces:
        known = [(step, loss) for _, step, loss in piece.points if loss is not None]
        if known and piece.agent != agent and known[0][0] <= 1:
            found, seams = {}, []
        agent = piece.agent if known else agent
        before = math.inf
        for step, loss in known:
            if step <= before and found:  # a new process, or a recovery in place
                found = {done: each for done, each in found.items() if done < step}
                seams.append(step - 1)
            found[step] = loss
            before = step
    finite = [(step, loss) for step, loss in found.items() if math.isfinite(loss)]
    return Losses(finite, seams, len(found) - len(finite))
