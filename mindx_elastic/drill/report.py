"""The result of a drill as rows and as JSON (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mindx_elastic.drill.drill import GOOD, Drill, DrillResult
from mindx_elastic.prove.report import to_json as proof_to_json

__all__ = ["COLUMNS", "SCHEMA", "cells", "summary", "to_json"]

SCHEMA = 4
COLUMNS = ("fault", "exit codes", "reached", "resumed", "lost", "again s", "result")


def cells(result: DrillResult) -> Sequence[str]:
    """One line of the table, as `COLUMNS`."""
    outcome = result.outcome
    if outcome == "differs" and result.step is not None:
        outcome = f"differs at step {result.step}"
    went_on = result.lost is not None
    return (
        str(result.fault),
        " ".join(map(str, result.codes)),
        "-" if result.reached is None else str(result.reached),
        "-" if not went_on else "fresh" if result.resumed is None else str(result.resumed),
        "-" if result.lost is None else str(result.lost),
        "-" if result.again_s is None else f"{result.again_s:.2f}",
        outcome,
    )


def summary(drill: Drill) -> str:
    """One line: how many faults fired, and what became of them."""
    counts = Counter(result.outcome for result in drill.results)
    fired = sum(result.outcome != "not fired" for result in drill.results)
    lost = [result.lost for result in drill.results if result.lost is not None]
    parts = [f"{counts[name]} {name}" for name in (*GOOD, *sorted(set(counts) - set(GOOD))) if counts[name]]
    return f"{fired} of {len(drill.results)} faults fired: {', '.join(parts) or 'none'}; {sum(lost)} steps done again"


def to_json(drill: Drill, *, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """The document of ``--json``."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "exit_code": drill.exit_code,
        "seconds": round(seconds, 1),
        "summary": summary(drill),
        "notes": list(drill.notes),
        "uninterrupted": proof_to_json(drill.proof, command=command, seconds=seconds),
        "faults": [_fault(result) for result in drill.results],
    }


def _fault(result: DrillResult) -> dict[str, Any]:
    found = result.explained
    return {
        "fault": str(result.fault),
        "outcome": result.outcome,
        "exit_codes": list(result.codes),
        "reached_step": result.reached,
        "resumed_step": result.resumed,
        "steps_lost": result.lost,
        "steps_compared": result.compared,
        "trained_again_s": result.again_s,
        "rank": result.rank,
        "step": result.step,
        "what": None if found is None else found.what,
        "cause": (found.cause or None) if found is not None else None,
        "remedy": (found.remedy or None) if found is not None else None,
        "left_behind": list(result.leftovers),
        "last_lines": list(result.lines),
    }
