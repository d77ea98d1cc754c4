"""The page of a report: one HTML file without a script, and without anything from a network."""

from __future__ import annotations

import time
from pathlib import Path

import jinja2
from markupsafe import Markup

from mindx_elastic.agent.history import FAILED, FINISHED, AttemptRecord, add_up, totals_line
from mindx_elastic.core.printable import printable
from mindx_elastic.report.run_history import Bar, Mark, RunHistory, remarks_of_run

__all__ = ["make_page"]

_MOST_ROWS = 600
_MOST_LINES = 25  # of what a failed rank wrote last
_MOST_CHARACTERS = 2000
_MOST_RANKS, _MOST_ON_A_LINE = 64, 400
_MARKS = ("fault", "save", "recovery", "no recovery")
"""Drawn on a rank's line; other marks are in a table."""
_COLOURS = {
    "productive": "#2a9d6f",
    "stall": "#b9a44c",
    "redone": "#c2452d",
    "detect": "#d98e04",
    "save": "#8a63d2",
    "restart": "#3b7dd8",
    "resume": "#17a2b8",
    "in place": "#d6628f",
    "first start": "#a8a29e",
    "paused": "#6b7280",
}
"""Colours by `Share.name`."""


def make_page(story: RunHistory) -> str:
    """The whole page. Everything that comes out of a log is escaped."""
    run = story.run
    failure = next((record for record in reversed(run.records) if record.outcome == FAILED), None)
    total_s = max(story.end - story.start, 1e-6)
    made = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value, _MOST_CHARACTERS),
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
    )
    made.filters |= {"known": _known, "span": lambda seconds: "-" if seconds is None else _span(seconds)}
    made.globals["percent"] = lambda seconds: round(100 * min(1.0, max(0.0, seconds / total_s)), 2)
    return made.get_template("page.html.j2").render(
        date=_date(story.start),
        story=story,
        run=run,
        failure=failure,
        last_lines=None if failure is None else story.last_lines.get(failure.cause_rank or 0),
        ended_well=run.outcome.startswith(FINISHED),
        remarks=remarks_of_run(run),
        next=_next(story, failure),
        tiles=_tiles(story, total_s),
        totals=totals_line(add_up(run.records)),
        total_s=total_s,
        alarms=[mark for mark in story.marks if mark.kind not in _MARKS],
        colours=_COLOURS,
        most_rows=_MOST_ROWS,
        most_lines=_MOST_LINES,
        ranks=_ranks(story),
        most_ranks=_MOST_RANKS,
        most_on_a_line=_MOST_ON_A_LINE,
    )


def _next(story: RunHistory, failure: AttemptRecord | None) -> str:
    run, last = story.run, story.run.records[-1] if story.run.records else None
    if run.outcome.startswith(FINISHED):
        return "nothing, the training has finished"
    if run.ended is None:
        return "mindx-elastic status says whether it runs; if it was killed, start the same command again to go on"
    if failure is None or failure is not last:
        return "start the same command again to go on"
    reached = -1 if failure.step_reached is None else failure.step_reached
    onward = "" if reached < 0 else "; it goes on from the newest good checkpoint (mindx-elastic plan names it)"
    return f"remove the cause (mindx-elastic logs) and start the same command again{onward}"


def _tiles(story: RunHistory, total_s: float) -> list[tuple[str, str]]:
    totals = add_up(story.run.records)
    return [
        (_span(total_s), "in all"),
        (f"{100 * story.shares[0].seconds / total_s:.1f} %", "productive"),
        (_known(story.step), "step reached"),
        (f"{totals.attempts}", "attempts"),
        (f"{totals.failures}", f"failures, {totals.in_place} recovered in place"),
        (f"{totals.steps_lost}", "steps lost" if not totals.unknown_losses else "steps lost, as far as known"),
    ]


def _ranks(story: RunHistory) -> list[tuple[int, list[Bar], list[Mark]]]:
    """Each rank with the newest of its processes and marks; those with faults first where there are too many."""
    found: dict[int, tuple[list[Bar], list[Mark]]] = {}
    for mark in sorted(story.marks, key=lambda mark: mark.kind != "fault"):
        if mark.rank is not None and mark.kind in _MARKS:
            found.setdefault(mark.rank, ([], []))[1].append(mark)
    for bar in story.bars:
        found.setdefault(bar.rank, ([], []))[0].append(bar)
    shown = sorted(list(found.items())[:_MOST_RANKS])
    return [(rank, bars[-_MOST_ON_A_LINE:], marks[-_MOST_ON_A_LINE:]) for rank, (bars, marks) in shown]


def _span(seconds: float) -> str:
    """A duration: ``0.13 s``, ``42 s``, ``3 min 20 s``, ``5 h 7 min``, ``3 d 4 h``."""
    whole = round(seconds)
    for size, name, small, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {name}" + (f" {rest} {below}" if rest else "")
    return f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"


def _known(value: int | None) -> str:
    return "-" if value is None else "none" if value == -1 else f"{value:,}"


def _date(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
