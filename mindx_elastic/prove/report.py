"""The result of a proof as JSON and as JUnit's XML (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from mindx_elastic.core.printable import printable
from mindx_elastic.prove.baseline import Proof, Row
from mindx_elastic.prove.causes import Explained

__all__ = ["SCHEMA", "describe", "describe_cause", "describe_run", "to_json", "to_junit"]

SCHEMA = 1


def describe(row: Row) -> list[str]:
    """A row's difference in lines."""
    return [] if row.verdict.explained is None else describe_cause(row.verdict.explained)


def describe_run(row: Row) -> list[str]:
    """The same, and the end of what the run has printed."""
    return [*describe(row), *row.verdict.lines]


def describe_cause(found: Explained) -> list[str]:
    """What differs, the usual cause, what to write, what else differs, which variables."""
    lines = [found.what]
    lines += [f"usual cause: {found.cause}"] if found.cause else []
    lines += [f"what to write: {found.remedy}"] if found.remedy else []
    lines += [f"at the same step differ: {found.also}"] if found.also else []
    lines += [f"variables of the program that the resumed run did not get back: {found.variables}"] * bool(
        found.variables
    )
    return lines


def to_json(proof: Proof, *, command: Sequence[str], seconds: float, repeat: Sequence[str] = ()) -> dict[str, Any]:
    """The document of ``--json``. `repeat`: the whole line that makes the same runs again."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "repeat": list(repeat),
        "outcome": proof.verdict.outcome,
        "exit_code": proof.exit_code,
        "steps": proof.steps,
        "whole_training": proof.has_ended,
        "ranks": proof.num_ranks,
        "seconds": round(seconds, 1),
        "notes": list(proof.notes),
        "writes": list(proof.writes),
        "runs": [_row(row) for row in proof.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    verdict = row.verdict
    found = verdict.explained
    return {
        "name": row.name,
        "outcome": verdict.outcome,
        "resumed_step": row.resumed,
        "steps_compared": row.compared,
        "first_difference": None
        if found is None
        else {
            "rank": verdict.rank,
            "step": verdict.step,
            "what": found.what,
            "cause": found.cause or None,
            "remedy": found.remedy or None,
            "also": found.also or None,
            "variables": found.variables or None,
        },
        "last_lines": list(verdict.lines),
    }


def to_junit(proof: Proof, *, command: Sequence[str], seconds: float) -> str:
    """One test case a run; an error where nothing could be proved, else a failure."""
    kinds = {"refused": "error", "fails": "error"}
    bad = [kinds.get(row.verdict.outcome, "failure") for row in proof.rows if row.verdict.outcome != "equal"]
    suite = ElementTree.Element(
        "testsuite",
        name=f"mindx-elastic prove {printable(' '.join(command))}",
        tests=str(len(proof.rows)),
        failures=str(bad.count("failure")),
        errors=str(bad.count("error")),
        time=f"{seconds:.1f}",
    )
    for row in proof.rows:
        case = ElementTree.SubElement(suite, "testcase", classname="mindx_elastic.prove", name=row.name)
        if row.verdict.outcome != "equal":
            lines = [printable(line) for line in (*describe(row), *row.verdict.lines)]
            kind = kinds.get(row.verdict.outcome, "failure")
            problem = ElementTree.SubElement(case, kind, type=row.verdict.outcome, message=lines[0] if lines else "")
            problem.text = "\n".join(lines)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
