"""The page of a report: one HTML file without a script, and without anything from a network."""

from __future__ import annotations

import time
from pathlib import Path

import jinja2
from markupsafe import Markup

from mindx_elastic.agent.ledger import FAILED, FINISHED, AttemptRecord, add_up, totals_line
from mindx_elastic.agent.restarts import advice
from mindx_elastic.core.printable import printable
from mindx_elastic.report.drawing import goodput, span, timeline
from mindx_elastic.report.run_history import RunHistory, remarks_of_run

__all__ = ["make_page"]

_MOST_ROWS = 600
_MOST_LINES = 25  # of what a failed rank wrote last
_MOST_CHARACTERS = 2000
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
    svg, notes = timeline(story)
    made = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value, _MOST_CHARACTERS),
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
    )
    made.filters |= {"known": _known, "span": lambda seconds: "-" if seconds is None else span(seconds)}
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
        goodput=Markup(goodput(story.shares, total_s)),
        alarms=[mark for mark in story.marks if mark.kind not in ("save", "fault", "recovery", "no recovery")],
        colours=_COLOURS,
        most_rows=_MOST_ROWS,
        most_lines=_MOST_LINES,
        timeline=Markup(svg),
        timeline_notes=notes,
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
    where = advice(failure.cause or "", -1 if failure.cause_rank is None else failure.cause_rank, reached)
    onward = "" if reached < 0 else "; it goes on from the newest good checkpoint (mindx-elastic plan names it)"
    return f"look at {where}. Remove the cause and start the same command again{onward}"


def _tiles(story: RunHistory, total_s: float) -> list[tuple[str, str]]:
    totals = add_up(story.run.records)
    return [
        (span(total_s), "in all"),
        (f"{100 * story.shares[0].seconds / total_s:.1f} %", "productive"),
        (_known(story.step), "step reached"),
        (f"{totals.attempts}", "attempts"),
        (f"{totals.failures}", f"failures, {totals.in_place} recovered in place"),
        (f"{totals.steps_lost}", "steps lost" if not totals.unknown_losses else "steps lost, as far as known"),
    ]


def _known(value: int | None) -> str:
    return "-" if value is None else "none" if value == -1 else f"{value:,}"


def _date(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
