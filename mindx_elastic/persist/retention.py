"""Decides which old checkpoints may be deleted. Pure: no clock and no file system.

The two rules and their precedence are those of ``CheckpointConfig``: ``keep_checkpoint_max`` keeps that many of the
newest; ``keep_checkpoint_per_n_minutes`` keeps one for each n minutes; where both are set the second has no effect. A
rule that keeps the oldest file inside the n minutes before the newest save would let the kept files come closer than
n minutes. Here a kept file is at least n minutes younger than the one kept before it. The rule looks at the past only,
so deciding after each save and deciding once at the end keep the same files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from mindx_elastic.core.moment import Moment
from mindx_elastic.errors import UsageError

__all__ = ["choose_deletions"]


def choose_deletions(
    created: Mapping[Moment, float],
    *,
    keep_max: int | None,
    keep_per_n_minutes: float | None,
    protect: Collection[Moment],
) -> list[Moment]:
    """Moments (a step of an attempt of a run) whose files may be deleted, oldest first.

    created: when each moment was last written, unix seconds; of one rank's periodic files.
    keep_max: how many moments to keep, newest first; None or 0: no such limit.
    keep_per_n_minutes: minutes between kept moments; the newest is kept too. None or 0: no such rule. Without
        effect where `keep_max` is set. With neither nothing is deleted.
    protect: moments that are kept in any case. The caller gives the newest complete one (from
        `start.inventory.newest_complete`: one rank's files do not show whether the other ranks have theirs) and the
        one just committed (after the clock was set back, the newest file does not have the newest time). A
        protected moment counts towards `keep_max` only when it is among the newest anyway.

    The newest moment is never deleted. Raises `UsageError` on a negative or non-finite limit. Any thread.
    """
    if keep_max is not None and keep_max < 0:
        raise UsageError(f"keep_checkpoint_max={keep_max}: give a number from 0 (no limit)")
    if keep_per_n_minutes is not None and not (math.isfinite(keep_per_n_minutes) and keep_per_n_minutes >= 0):
        raise UsageError(f"keep_checkpoint_per_n_minutes={keep_per_n_minutes}: give minutes from 0 (rule not used)")
    # By time, not by step: after a restart from an older step, or with a second run in the same directory,
    # the low steps are the new ones, and deleting the lowest would delete what was just written.
    moments = sorted(created, key=lambda moment: (created[moment], *moment[1:], moment[0]))
    if keep_max:
        kept = set(moments[-keep_max:])
    elif keep_per_n_minutes:
        kept = _one_per_interval(moments, created, keep_per_n_minutes * 60.0)
    else:
        return []
    kept.update(moments[-1:], protect)
    return [moment for moment in moments if moment not in kept]


def _one_per_interval(moments: Sequence[Moment], created: Mapping[Moment, float], interval_s: float) -> set[Moment]:
    kept: set[Moment] = set()
    last_kept = -math.inf
    for moment in moments:
        if created[moment] - last_kept >= interval_s:
            kept.add(moment)
            last_kept = created[moment]
    return kept
