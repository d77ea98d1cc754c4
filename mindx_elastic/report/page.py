"""The page of a report: one HTML file without a script, and without anything from a network."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from mindx_elastic.agent.ledger import FAILED, FINISHED, AttemptRecord, add_up, totals_line
from mindx_elastic.agent.restarts import advice
from mindx_elastic.report.drawing import escape, goodput, loss_line, span, step_line, timeline
from mindx_elastic.report.story import Story, remarks_of_run

__all__ = ["make_page"]

_MOST_ROWS = 600
_MOST_LINES = 25  # of what a failed rank wrote last
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
"""By `Share.name`."""
_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2128;--dim:#57606a;--line:#d8dee4;--card:#f6f8fa;--even:#3b7dd8;
--odd:#7aa7e6;--bad:#c2452d;--save:#2a9d6f;--mark:#8a63d2}
@media (prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--dim:#9aa4af;--line:#30363d;--card:#161b22;
--even:#4f8fe6;--odd:#2f5f9e;--bad:#f0705a;--save:#4cc38f;--mark:#b594f5}}
@media print{:root{color-scheme:light;--back:#fff;--text:#000;--dim:#444;--line:#bbb;--card:#fff;--even:#3b7dd8;
--odd:#7aa7e6;--bad:#c2452d;--save:#2a9d6f;--mark:#8a63d2}section{break-inside:avoid}*{print-color-adjust:exact}}
*{box-sizing:border-box}body{margin:0 auto;padding:24px;max-width:1100px;background:var(--back);color:var(--text);
font:15px/1.45 system-ui,sans-serif}h1{font-size:22px;margin:0}h2{font-size:16px;margin:28px 0 8px}
p{margin:4px 0;color:var(--dim)}.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0}.tile{background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:8px 14px;min-width:110px}.tile b{display:block;font-size:20px}
.tile span{color:var(--dim);font-size:13px}svg{overflow:visible}.plot{display:block;width:calc(100% - 62px);
margin-left:54px}.plot[aria-label^=where]{width:100%;margin:0}svg text{fill:var(--dim);font:11px system-ui,sans-serif}
polyline{vector-effect:non-scaling-stroke}.what{border-left:4px solid var(--save);padding:2px 14px;margin:16px 0}
.what.bad{border-color:var(--bad)}.what p{color:var(--text);overflow-wrap:anywhere}.what b{font-weight:600}
code,pre{font:13px/1.4 ui-monospace,monospace}pre{background:var(--card);border:1px solid var(--line);margin:8px 0;
border-radius:6px;padding:8px 10px;white-space:pre-wrap;overflow-wrap:anywhere}
.tick{stroke:var(--line);stroke-width:1}.even{fill:var(--even)}.odd{fill:var(--odd)}
rect.bad{fill:var(--bad);opacity:.75}.m-fault{stroke:var(--bad);stroke-width:2;fill:none}.m-save{stroke:var(--save);
stroke-width:1.5}.m-recovery{fill:var(--mark);stroke:var(--back);stroke-width:1}.steps{fill:none;stroke:var(--even);
stroke-width:2}.dot{fill:var(--even)}
.again{fill:none;stroke:var(--bad);stroke-width:7;opacity:.45}
.seam{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 3}
table{border-collapse:collapse;width:100%;font-size:13px}th,td{text-align:right;padding:3px 8px;
border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums;vertical-align:top}th{color:var(--dim);
font-weight:600}td.text,th.text{text-align:left}
td,th{white-space:nowrap}td.text{overflow-wrap:anywhere;white-space:normal;min-width:9em}.wide{overflow-x:auto}
@media print{.wide{overflow:visible}}@media(max-width:600px){body{padding:12px}td.text{min-width:7em}}
.key{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
"""


def make_page(story: Story) -> str:
    """The whole page. Everything that comes out of a log is escaped."""
    total_s = story.end - story.start
    time_line, line_notes = timeline(story)
    steps, step_notes = step_line(story)
    losses, loss_notes = loss_line(story.losses)
    sections = [
        _section("Where the time went", goodput(story.shares, total_s) + _shares(story, total_s)),
        _section(
            "Ranks over time",
            time_line,
            "A bar is a process: blue in turn by attempt, red where it failed. Cross: fault; green line: save; "
            "violet diamond: recovered in place.",
            *line_notes,
        ),
        _section(
            "Step over time",
            steps,
            "Dashed: the job went on in a new attempt.",
            *step_notes,
        ),
        _section(
            "Loss over steps",
            losses,
            "Rank 0's, as the program gave it to step_end(loss=...). Dashed: the job went on behind that step; "
            "broad red: what was known of steps that were then done again, under the line of the second time.",
            *loss_notes,
        ),
        _section("Attempts", _attempts(story)),
    ]
    if story.run.recoveries:
        sections.append(_section("Recoveries in place", _recoveries(story)))
    if story.saves:
        sections.append(_section("Saves", _saves(story)))
    if any(mark.kind not in ("save", "fault", "recovery", "no recovery") for mark in story.marks):
        sections.append(_section("Alarms and orders", _alarms(story)))
    sections.append(_section("Sources", _sources(story)))
    style = _STYLE + "".join(f".part-{name.replace(' ', '-')}{{fill:{colour}}}" for name, colour in _COLOURS.items())
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Run of {_date(story.start)}</title><style>{style}</style></head><body>"
        f"<h1>Run of {_date(story.start)}</h1>{_head(story)}{''.join(sections)}</body></html>\n"
    )


def _section(title: str, body: str, *notes: str) -> str:
    return f"<section><h2>{title}</h2>{body}{''.join(f'<p>{escape(note)}</p>' for note in notes)}</section>"


def _what_happened(story: Story) -> str:
    """How it ended, the last failure with its exception, the command, and what to do next."""
    run, records = story.run, story.run.records
    failure = next((record for record in reversed(records) if record.outcome == FAILED), None)
    host = f" on {escape(run.host)}" if run.host else ""
    agent = f"agent {run.pid}" if run.pid is not None else "no agent"
    found = [f"<p><b>{escape(run.outcome or 'no end recorded')}</b> ({agent}{host})</p>"]
    if failure is not None:
        rank = "" if failure.cause_rank is None else f"rank {failure.cause_rank}: "
        step = "" if failure.step_reached in (None, -1) else f", behind step {failure.step_reached:,}"
        found.append(
            f"<p>Attempt {failure.attempt} failed{step}. {rank}<code>{escape(failure.cause or '?')}</code></p>"
        )
    found += [f"<p>{escape(line, 1000)}</p>" for line in remarks_of_run(run)]
    found.append(f"<p><b>Next:</b> {escape(_next(story, failure))}</p>")
    if run.command:
        found.append(f"<p>The command:</p><pre>{escape(run.command, 2000)}</pre>")
    if failure is not None and (kept := story.last_lines.get(failure.cause_rank or 0)):
        lines = "<br>".join(escape(line) for line in kept[1:][-_MOST_LINES:])
        found.append(f"<p>The last lines of {escape(kept[0].lstrip('# '))}:</p><pre>{lines}</pre>")
    ended_well = run.outcome.startswith(FINISHED)
    return f'<div class="what{"" if ended_well else " bad"}">{"".join(found)}</div>'


def _next(story: Story, failure: AttemptRecord | None) -> str:
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


def _head(story: Story) -> str:
    totals = add_up(story.run.records)
    total_s = max(story.end - story.start, 1e-6)
    best = max((step for points in story.steps for _, step in points), default=None)
    tiles = [
        (span(total_s), "in all"),
        (f"{100 * story.shares[0].seconds / total_s:.1f} %", "productive"),
        ("-" if best is None else f"{best:,}", "step reached"),
        (f"{totals.attempts}", "attempts"),
        (f"{totals.failures}", f"failures, {totals.in_place} recovered in place"),
        (f"{totals.steps_lost}", "steps lost" if not totals.unknown_losses else "steps lost, as far as known"),
    ]
    cards = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in tiles)
    return f'{_what_happened(story)}<div class="tiles">{cards}</div><p>{escape(totals_line(totals))}</p>'


def _shares(story: Story, total_s: float) -> str:
    rows = [
        (
            f'<span class="key" style="background:{_COLOURS[share.name]}"></span>{share.name}',
            span(share.seconds),
            f"{100 * share.seconds / max(total_s, 1e-6):.2f} %",
            share.meaning,
        )
        for share in story.shares
    ]
    return _table(("", "time", "share", "what it is"), rows, {0, 3})


def _attempts(story: Story) -> str:
    rows = []
    for record in story.run.records:
        cause = "" if record.cause is None else f": {record.cause}"
        rank = "" if record.cause_rank is None else f", rank {record.cause_rank}"
        rows.append(
            (
                str(record.attempt),
                escape(f"{record.outcome or 'no end recorded'}{rank}{cause}"),
                _known(record.world_size),
                "fresh" if record.resumed_step == -1 else _known(record.resumed_step),
                _known(record.step_reached),
                _known(record.saved_step),
                _known(record.steps_lost),
                *(
                    "-" if value is None else span(value)
                    for value in (record.detect_s, record.save_s, record.restart_s, record.first_step_s)
                ),
            )
        )
    names = ("#", "how it ended", "ranks", "from", "to", "saved", "lost", "detect", "save", "restart", "1st step")
    return _table(names, rows, {1})


def _recoveries(story: Story) -> str:
    rows = [
        (
            f"{record.attempt}.{record.generation}",
            escape(", ".join(map(str, record.ranks)), 100),
            escape(record.cause or "gone"),
            escape(f"{record.outcome}{f': {record.reason}' if record.reason else ''}"),
            _known(record.step),
            _known(record.steps_lost),
            "-" if record.duration_s is None else span(record.duration_s),
        )
        for record in story.run.recoveries
    ]
    return _table(("#", "ranks", "cause", "outcome", "step", "lost", "took"), rows, {2, 3})


def _saves(story: Story) -> str:
    rows = []
    for kind, saves in sorted(story.saves.items()):
        mean = saves.duration_s / saves.count if saves.count else 0.0
        speed = saves.nbytes / saves.duration_s / 1e6 if saves.duration_s > 0 else 0.0
        size = saves.nbytes / saves.count / 1e6 if saves.count else 0.0
        rows.append(
            (
                escape(kind),
                f"{saves.count:,}",
                f"{saves.failed:,}",
                f"{size:,.1f} MB",
                span(mean),
                span(saves.longest_s),
                f"{speed:,.0f} MB/s",
            )
        )
    return _table(("kind", "files", "failed", "mean size", "mean time", "longest", "speed"), rows, {0})


def _alarms(story: Story) -> str:
    marks = [mark for mark in story.marks if mark.kind not in ("save", "fault", "recovery", "no recovery")]
    rows = [(span(mark.time - story.start), escape(mark.kind), _known(mark.step), escape(mark.text)) for mark in marks]
    return _table(("after", "event", "step", "reason"), rows, {1, 3})


def _sources(story: Story) -> str:
    files = "".join(f"<p>{escape(path, 1000)}</p>" for path in story.sources)
    torn = "every line of them is an event" if not story.torn else f"{story.torn:,} torn or foreign lines were left out"
    older = f"; {story.older_runs} older runs of an agent in the same log are not shown" if story.older_runs else ""
    alone = "" if len(story.sources) > 1 else "<p>without the ranks' own log (--checkpoints): no saves are known</p>"
    return f"{files}<p>{torn}{older}</p>{alone}"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], texts: set[int]) -> str:
    """Cells are HTML; the newest `_MOST_ROWS` rows are shown."""

    def cell(tag: str, number: int, content: str) -> str:
        return f"<{tag} class=text>{content}</{tag}>" if number in texts else f"<{tag}>{content}</{tag}>"

    found = list(rows)
    left = f"<p>{len(found) - _MOST_ROWS} earlier ones are not shown</p>" if len(found) > _MOST_ROWS else ""
    head = "".join(cell("th", number, name) for number, name in enumerate(names))
    body = "".join(
        f"<tr>{''.join(cell('td', number, content) for number, content in enumerate(row))}</tr>"
        for row in found[-_MOST_ROWS:]
    )
    return f'{left}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _known(value: int | None) -> str:
    return "-" if value is None else "none" if value == -1 else f"{value:,}"


def _date(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
