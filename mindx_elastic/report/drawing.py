"""The figures of a report as inline SVG: no script, colours by the page's style sheet. Text from others is escaped.

A figure is as wide as the page: places across are in percent, heights in pixels, so that words and marks keep their
size on a narrow screen.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from mindx_elastic.core.printable import printable
from mindx_elastic.report.run_history import Bar, Mark, RunHistory, TimeShare

__all__ = ["escape", "goodput", "span", "timeline"]

_ROW, _MOST_ROWS, _MOST_BARS, _MOST_MARKS = 16, 64, 6000, 3000
_MARK_GAP = 0.8
_MARKS = {"fault": "fault", "save": "save", "recovery": "recovery", "no recovery": "fault"}
_SHAPES = {"fault": "M-4,-4L4,4M-4,4L4,-4", "save": "M0,-6L0,6", "recovery": "M0,-6L5,0L0,6L-5,0Z"}
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_MOST_TICKS = 5


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


class _Figure:
    """What is between two moments (unix seconds)."""

    def __init__(self, first: float, last: float, height: int) -> None:
        self.first, self.length, self.height = first, max(last - first, 1e-6), height
        self.parts: list[str] = []

    def x(self, at: float) -> float:
        """Percent."""
        return round(100 * min(1.0, max(0.0, (at - self.first) / self.length)), 2)

    def times(self) -> None:
        """An axis: seconds since the first moment."""
        gap = next((tick for tick in _TICKS if self.length / tick <= _MOST_TICKS), self.length / _MOST_TICKS)
        for number in range(int(self.length / gap) + 1):
            x, words = self.x(self.first + gap * number), span(gap * number) if number else "0"
            self.parts.append(f'<line class="tick" x1="{x}%" y1="0" x2="{x}%" y2="{self.height}"/>')
            anchor = "end" if x > 94 else "middle"  # words at the edge would be cut off
            self.parts.append(f'<text x="{x}%" y="{self.height + 14}" text-anchor="{anchor}">{words}</text>')

    def draw(self, label: str, *, below: int = 20) -> str:
        """below: room for the words of the axis."""
        head = f'<svg class="plot" height="{self.height + below}" role="img" aria-label="{label}">'
        return f"{head}{''.join(self.parts)}</svg>"


def goodput(shares: Sequence[TimeShare], total_s: float) -> str:
    """One bar of all parts of the time."""
    figure, at = _Figure(0.0, total_s, 34), 0.0
    for share in shares:
        part = 100 * share.seconds / max(total_s, 1e-6)
        title = f"{escape(share.name)}: {span(share.seconds)}, {part:.2f} %"
        kind = share.name.replace(" ", "-")
        place = f'x="{figure.x(at)}%" y="0" width="{max(part, 0.05):.2f}%" height="34"'
        figure.parts.append(f'<rect class="part-{kind}" {place}><title>{title}</title></rect>')
        at += share.seconds
    return figure.draw("where the time went", below=0)


def timeline(story: RunHistory) -> tuple[str, list[str]]:
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
    figure = _Figure(story.start, story.end, _ROW * max(len(ranks), 1) + 4)
    figure.times()
    figure.parts += [f'<text x="-6" y="{_ROW * rows[rank] + 13}" text-anchor="end">{rank}</text>' for rank in ranks]
    figure.parts += [_bar(bar, figure, rows[bar.rank]) for bar in bars]
    marks = [mark for mark in story.marks if mark.kind in _MARKS and (mark.rank is None or mark.rank in rows)]
    saves = _spread([mark for mark in marks if mark.kind == "save"], figure)
    others = [mark for mark in marks if mark.kind != "save"]
    shown = [*saves, *others[-_MOST_MARKS:]]  # faults over saves
    if len(shown) < len(marks):
        notes.append(f"{len(marks) - len(shown)} of {len(marks)} marks are not shown, as they are close to others")
    figure.parts += [_mark(mark, figure, rows.get(mark.rank, 0) if mark.rank is not None else 0) for mark in shown]
    return figure.draw("processes of each rank over time"), notes


def _spread(marks: Sequence[Mark], figure: _Figure) -> list[Mark]:
    """The marks of one kind that can be told from each other."""
    found, last = [], dict[int | None, float]()
    for mark in marks:
        x = figure.x(mark.time)
        if x - last.get(mark.rank, -_MARK_GAP) >= _MARK_GAP:
            found.append(mark)
            last[mark.rank] = x
    return found


def _bar(bar: Bar, figure: _Figure, row: int) -> str:
    x, end = figure.x(bar.start), figure.x(bar.end)
    kind = "bad" if bar.is_bad else "odd" if bar.attempt % 2 else "even"
    title = f"rank {bar.rank}, attempt {bar.attempt}: {escape(bar.how) or 'runs'}, {span(bar.end - bar.start)}"
    place = f'x="{x}%" y="{_ROW * row + 3}" width="{max(end - x, 0.1):.2f}%" height="{_ROW - 5}"'
    return f'<rect class="{kind}" {place}><title>{title}</title></rect>'


def _mark(mark: Mark, figure: _Figure, row: int) -> str:
    step = "" if mark.step is None else f" at step {mark.step}"
    title = f"<title>{escape(mark.kind)}{step}: {escape(mark.text)}</title>"
    kind, y = _MARKS[mark.kind], _ROW * row + _ROW // 2
    return f'<svg x="{figure.x(mark.time)}%" y="{y}"><path class="m-{kind}" d="{_SHAPES[kind]}">{title}</path></svg>'
