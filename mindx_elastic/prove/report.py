"""The result of a proof as JSON and as JUnit's XML (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree

from mindx_elastic.core.printable import printable
from mindx_elastic.prove.baseline import Proof, Row

__all__ = ["SCHEMA", "Case", "case_of", "describe", "junit", "to_json", "to_junit"]

SCHEMA = 1
_ERRORS = ("not fired", "refused", "fails")


def describe(row: Row) -> list[str]:
    """A row's difference in two lines at most, and the end of what the run has printed."""
    return [*([] if row.verdict.explained is None else row.verdict.explained.lines), *row.verdict.lines]


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
        "not_got_back": [asdict(each) for each in row.lost],
        "first_difference": None
        if found is None
        else {
            "rank": verdict.rank,
            "step": verdict.step,
            "what": found.what,
            "cause": found.cause or None,
            "remedy": found.remedy or None,
            "variables": found.variables or None,
        },
        "last_lines": list(verdict.lines),
    }


def to_junit(proof: Proof, *, command: Sequence[str], seconds: float) -> str:
    """One test case a run; an error where nothing could be proved, else a failure."""
    return junit("prove", command, [case_of(row, "mindx_elastic.prove") for row in proof.rows], seconds)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test case of JUnit's XML."""

    group: str
    name: str
    outcome: str
    is_good: bool
    said: Sequence[str]
    """Why it is not good."""


def case_of(row: Row, group: str) -> Case:
    outcome = row.verdict.outcome
    return Case(group=group, name=row.name, outcome=outcome, is_good=outcome == "equal", said=describe(row))


def junit(what: str, command: Sequence[str], cases: Sequence[Case], seconds: float) -> str:
    """The XML of ``--junit``: an error where nothing could be shown, else a failure."""
    kinds = [None if case.is_good else "error" if case.outcome in _ERRORS else "failure" for case in cases]
    suite = ElementTree.Element(
        "testsuite",
        name=f"mindx-elastic {what} {printable(' '.join(command))}",
        tests=str(len(cases)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
        time=f"{seconds:.1f}",
    )
    for case, kind in zip(cases, kinds, strict=True):
        element = ElementTree.SubElement(suite, "testcase", classname=case.group, name=case.name)
        if kind is not None:
            lines = [printable(line) for line in case.said]
            problem = ElementTree.SubElement(element, kind, type=case.outcome, message=lines[0] if lines else "")
            problem.text = "\n".join(lines)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
