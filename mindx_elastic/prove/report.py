"""The result of a proof as JSON (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mindx_elastic.prove.baseline import ProofReport, Row

__all__ = ["SCHEMA", "to_json"]

SCHEMA = 2


def to_json(proof: ProofReport, *, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """The document of ``--json``."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "outcome": proof.verdict.outcome,
        "exit_code": proof.exit_code,
        "steps": proof.steps,
        "whole_training": proof.has_ended,
        "ranks": proof.num_ranks,
        "seconds": round(seconds, 1),
        "notes": list(proof.notes),
        "runs": [_row(row) for row in proof.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    found = row.explained
    return {
        "name": row.name,
        "outcome": row.outcome,
        "resumed_step": row.resumed,
        "steps_compared": row.compared,
        "not_got_back": [asdict(each) for each in row.lost],
        "first_difference": None
        if found is None
        else {
            "rank": row.rank,
            "step": row.step,
            "what": found.what,
            "cause": found.cause or None,
            "remedy": found.remedy or None,
            "variables": found.variables or None,
        },
        "last_lines": list(row.lines),
    }
