"""Names one state of one run: the files of all ranks that carry the same moment belong together."""

from __future__ import annotations

__all__ = ["Moment", "moment_name"]

Moment = tuple[str, int, int]
"""run_id, attempt, step. Attempts are branches: the same step of two of them is two states."""


def moment_name(moment: Moment) -> str:
    """``run resnet attempt 2 step 40``; the first attempt, 0, is left out."""
    run, attempt, step = moment
    return f"run {run}{f' attempt {attempt}' if attempt else ''} step {step}"
