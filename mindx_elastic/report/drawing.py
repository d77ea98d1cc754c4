"""The figures of a report as inline SVG: no script, colours by the page's style sheet. Text from others is escaped."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from mindx_elastic.core.printable import printable
from mindx_elastic.report.losses import Losses
from mindx_elastic.report.story import Bar, Mark, Share, Story

__all__ = ["escape", "goodput", "loss_line", "span", "step_line", "thin", "timeline"]

_Point = TypeVar("_Point", bound=tuple[float, float])
WIDTH, _LEFT, _RIGHT = 1000, 70, 10
_ROW, _MOST_ROWS, _MOST_BARS, _MOST_MARKS, _MOST_POINTS = 16, 64, 6000, 3000, 2000
_PLOT_HEIGHT = 220
_MARK_GAP, _MANY_SEAMS, _SHORT_SEAM = 8, 40, 14
_MARKS = {"fault": "fault", "save": "save", "recovery": "recovery", "no recovery": "fault"}
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def escape(value: object, limit: int = 300) -> str:
    """Text from others, for HTML text and attributes in double quotes."""
    return html.escape(printable(value, limit))


def span(seconds: float) -> str:
    """A duration: ``0.13 s``, ``42 s``, ``3 min 20 s``, ``5 h 7 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, name, small, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {name}" + (f" {rest} {below}" if rest else "")
    raise AssertionError("unreachable")


def thin(items: Sequence[_Point], most: int) -> list[_Point]:
    """At most about `most` of the points: the first and the last, and the lowest and highest of each piece between."""
    if len(items) <= most:
        return list(items)
    pieces = max(1, most // 2)
    found: list[_Point] = []
    for number in range(pieces):
        piece = items[number * len(items) // pieces : (number + 1) * len(items) // pieces]
        if piece:
            low, high = min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])
            found += sorted({low, high})
    return sorted({items[0], *found, items[-1]})


class _Scale:
    """Time to the horizontal place in a figure."""

    def __init__(self, story: Story) -> None:
        self.start, self.length = story.start, max(story.end - story.start, 1e-6)

    def x(self, at: float) -> float:
        part = min(1.0, max(0.0, (at - self.start) / self.length))
        return round(_LEFT + part * (WIDTH - _LEFT - _RIGHT), 1)

    def axis(self, y: float) -> str:
        """Ticks and their words, seconds since the start."""
        gap = next((tick for tick in _TICKS if self.length / tick <= 10), self.length / 8)
        lines, at = [], 0.0
        while at <= self.length:
            x = self.x(self.start + at)
            lines.append(f'<line class="tick" x1="{x}" y1="0" x2="{x}" y2="{y}"/>')
            words = span(at) if at else "0"
            anchor = "end" if x > WIDTH - _RIGHT - 40 else "middle"  # words at the edge would be cut off
            lines.append(f'<text x="{x}" y="{y + 14}" text-anchor="{anchor}">{words}</text>')
            at += gap
        return "".join(lines)


def goodput(shares: Sequence[Share], total_s: float) -> str:
    """One bar of all parts of the time."""
    x, parts = 0.0, []
    for share in shares:
        width = WIDTH * share.seconds / max(total_s, 1e-6)
        title = f"{escape(share.name)}: {span(share.seconds)}, {100 * share.seconds / max(total_s, 1e-6):.2f} %"
        kind = share.name.replace(" ", "-")
        parts.append(
            f'<rect class="part-{kind}" x="{x:.2f}" y="0" width="{max(width, 0.5):.2f}" height="34">'
            f"<title>{title}</title></rect>"
        )
        x += width
    return _svg(WIDTH, 34, "where the time went", parts)


def timeline(story: Story) -> tuple[str, list[str]]:
    """A row a rank: its processes as bars, faults, saves and recoveries as marks; and what was left out."""
    notes = []
    ranks = sorted({bar.rank for bar in story.bars} | {mark.rank for mark in story.marks if mark.rank is not None})
    if len(ranks) > _MOST_ROWS:
        faulty = [mark.rank for mark in story.marks if mark.kind == "fault" and mark.rank is not None]
        chosen = list(dict.fromkeys([*faulty, *ranks]))[:_MOST_ROWS]
        notes.append(f"{len(ranks) - _MOST_ROWS} of {len(ranks)} ranks are not shown; those with faults go first")
        ranks = sorted(chosen)
    rows = {rank: number for number, rank in enumerate(ranks)}
    bars = [bar for bar in story.bars if bar.rank in rows]
    if len(bars) > _MOST_BARS:
        notes.append(f"{len(bars) - _MOST_BARS} of {len(bars)} bars are not shown, the shortest")
        bars = sorted(bars, key=lambda bar: bar.start - bar.end)[:_MOST_BARS]
    scale, height = _Scale(story), _ROW * max(len(ranks), 1) + 4
    parts = [scale.axis(height)]
    parts += [f'<text x="{_LEFT - 6}" y="{_ROW * rows[rank] + 13}" text-anchor="end">{rank}</text>' for rank in ranks]
    parts += [_bar(bar, scale, rows[bar.rank]) for bar in bars]
    marks = [mark for mark in story.marks if mark.kind in _MARKS and (mark.rank is None or mark.rank in rows)]
    saves = _spread([mark for mark in marks if mark.kind == "save"], scale)
    others = [mark for mark in marks if mark.kind != "save"]
    shown = [*saves, *others[-_MOST_MARKS:]]  # faults over saves
    if len(shown) < len(marks):
        notes.append(f"{len(marks) - len(shown)} of {len(marks)} marks are not shown, as they are close to others")
    parts += [_mark(mark, scale, rows.get(mark.rank, 0) if mark.rank is not None else 0) for mark in shown]
    return _svg(WIDTH, height + 20, "processes of each rank over time", parts), notes


def _spread(marks: Sequence[Mark], scale: _Scale) -> list[Mark]:
    """Of marks of one kind those that can be told from each other."""
    found, last = [], dict[int | None, float]()
    for mark in marks:
        x = scale.x(mark.time)
        if x - last.get(mark.rank, -_MARK_GAP) >= _MARK_GAP:
            found.append(mark)
            last[mark.rank] = x
    return found


def _bar(bar: Bar, scale: _Scale, row: int) -> str:
    x, end = scale.x(bar.start), scale.x(bar.end)
    kind = "bad" if bar.is_bad else "odd" if bar.attempt % 2 else "even"
    title = f"rank {bar.rank}, attempt {bar.attempt}: {escape(bar.how) or 'runs'}, {span(bar.end - bar.start)}"
    y, width = _ROW * row + 3, max(end - x, 0.8)
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width:.1f}" height="{_ROW - 5}"><title>{title}</title></rect>'


def _mark(mark: Mark, scale: _Scale, row: int) -> str:
    x, y, kind = scale.x(mark.time), _ROW * row + _ROW / 2, _MARKS[mark.kind]
    step = "" if mark.step is None else f" at step {mark.step}"
    title = f"<title>{escape(mark.kind)}{step}: {escape(mark.text)}</title>"
    shapes = {
        "fault": f"M{x - 4},{y - 4}L{x + 4},{y + 4}M{x - 4},{y + 4}L{x + 4},{y - 4}",
        "save": f"M{x},{y - 6}L{x},{y + 6}",
        "recovery": f"M{x},{y - 6}L{x + 5},{y}L{x},{y + 6}L{x - 5},{y}Z",
    }
    return f'<path class="m-{kind}" d="{shapes[kind]}">{title}</path>'


def step_line(story: Story) -> tuple[str, list[str]]:
    """The step over time: a line an attempt, and a seam where a failed one goes over into the next."""
    known = sum(map(len, story.steps))
    attempts = [points for points in story.steps if points]
    share = max(2, _MOST_POINTS // max(1, len(attempts)))
    drawn = [thin(points, share) for points in attempts]
    top = max((step for points in drawn for _, step in points), default=0)
    if top <= 0:
        return "", ["no step is known"]
    scale, parts = _Scale(story), []
    parts.append(scale.axis(_PLOT_HEIGHT))

    def y(step: int) -> float:
        return round(_PLOT_HEIGHT - 4 - step / top * (_PLOT_HEIGHT - 16), 1)

    for value in sorted({0, top // 2, top}):
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value}</text>')
    seam_top = 0 if len(drawn) <= _MANY_SEAMS else _PLOT_HEIGHT - _SHORT_SEAM
    for before, after in itertools.pairwise(drawn):
        x = scale.x(after[0][0])
        lost = max(0, before[-1][1] - after[0][1])
        title = (
            f"<title>on from step {after[0][1]} after {span(after[0][0] - before[-1][0])}, {lost} steps back</title>"
        )
        parts.append(f'<line class="seam" x1="{x}" y1="{seam_top}" x2="{x}" y2="{_PLOT_HEIGHT}">{title}</line>')
    for points in drawn:
        places = " ".join(f"{scale.x(at)},{y(step)}" for at, step in points)
        parts.append(f'<polyline class="steps" points="{places}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="dot" cx="{scale.x(points[0][0])}" cy="{y(points[0][1])}" r="2"/>')
    shown = sum(map(len, drawn))
    notes = [f"{shown} of {known} known points are drawn"] if shown < known else []
    return _svg(WIDTH, _PLOT_HEIGHT + 20, "step over time", parts), notes


def loss_line(losses: Losses) -> tuple[str, list[str]]:
    """The loss over the steps: one line over all restarts, what was done again, and the seams."""
    parts = [*losses.kept, *losses.redone]
    points = [point for part in parts for point in part]
    notes = [f"{losses.num_not_finite} losses are not finite and not drawn"] if losses.num_not_finite else []
    if not points:
        return "", [*notes, "no loss is known: the job gave none to step_end(loss=...), or rank 0 ran on another node"]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    most = max(2, _MOST_POINTS // max(1, len(losses.kept)))

    def x(step: int) -> float:
        return round(_LEFT + (step - first) / max(last - first, 1) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(loss: float) -> float:
        part = (loss / 2 - low / 2) / max(high / 2 - low / 2, 5e-324)  # halves: the span of two floats may overflow
        return round(_PLOT_HEIGHT - 4 - part * (_PLOT_HEIGHT - 16), 1)

    found = []
    for step in sorted({first + (last - first) * piece // 5 for piece in range(6)}):
        found.append(f'<line class="tick" x1="{x(step)}" y1="0" x2="{x(step)}" y2="{_PLOT_HEIGHT}"/>')
        anchor = "end" if step == last > first else "middle"
        found.append(f'<text x="{x(step)}" y="{_PLOT_HEIGHT + 14}" text-anchor="{anchor}">{step}</text>')
    for loss in sorted({low, low / 2 + high / 2, high}):
        found.append(f'<text x="{_LEFT - 6}" y="{y(loss) + 4}" text-anchor="end">{loss:.4g}</text>')
    seam_top = 0 if len(losses.seams) <= _MANY_SEAMS else _PLOT_HEIGHT - _SHORT_SEAM
    for seam in losses.seams:
        again = f", {seam.done_again} noted steps were done again" if seam.done_again else ""
        found.append(
            f'<line class="seam" x1="{x(seam.step)}" y1="{seam_top}" x2="{x(seam.step)}" y2="{_PLOT_HEIGHT}">'
            f"<title>on behind step {seam.step}{again}</title></line>"
        )
    drawn = 0
    for part in losses.redone:
        thinned = thin(part, most)
        drawn += len(thinned)
        found.append(f'<polyline class="again" points="{" ".join(f"{x(s)},{y(v)}" for s, v in thinned)}"/>')
    for part in losses.kept:
        thinned = thin(part, most)
        drawn += len(thinned)
        found.append(f'<polyline class="steps" points="{" ".join(f"{x(s)},{y(v)}" for s, v in thinned)}"/>')
    if drawn < len(points):
        notes.append(f"{drawn} of {len(points)} noted losses are drawn")
    return _svg(WIDTH, _PLOT_HEIGHT + 20, "loss over steps", found), notes


def _svg(width: int, height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )
