"""The certificate of a run: an entry for each resume, with what its comparison has shown.

Each entry is a JSON text in the header of every later file. It claims the compared steps and no more, and is no
signature. The last `MOST` are kept. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from mindx_elastic.core.printable import printable
from mindx_elastic.core.values import real, text, whole

__all__ = ["COMPARED", "MOST", "NOT_COMPARED", "Entry", "Proof", "added", "date_of", "entries_of", "proof_of"]

MOST = 64
COMPARED = ("verified", "variables differ", "differs")
NOT_COMPARED = "not compared"
_MOST_CHARACTERS = 200
"""Of a text in an entry: a header takes an entry of 1024."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One resume of one rank."""

    after: int
    """The step of the boundary that it went on from."""
    last: int
    """The steps ``after + 1`` to this one were compared; where none was, it is `after`."""
    outcome: str
    """One of `COMPARED`, or `NOT_COMPARED`."""
    why: str = ""
    """What differs, or why nothing was compared."""
    ranks: int
    date: float
    """Unix seconds."""

    @property
    def span(self) -> str:
        return f"step {self.last}" if self.last <= self.after + 1 else f"steps {self.after + 1} to {self.last}"

    @property
    def words(self) -> str:
        """Its outcome."""
        before = f"{self.span} equal, and not got back" if self.outcome == COMPARED[1] else self.outcome
        return f"{before}: {self.why}" if self.why else before


def added(chain: Sequence[str], entry: Entry) -> tuple[str, ...]:
    """`chain` with one entry more. It takes the place of a last one after the same boundary: no step lies between."""
    texts = list(chain)
    if texts and _object(texts[-1]).get("after") == entry.after:
        texts.pop()
    why = printable(entry.why)[:_MOST_CHARACTERS]
    texts.append(json.dumps({**asdict(entry), "why": why}, ensure_ascii=False))
    return tuple(texts[-MOST:])


def entries_of(chain: Sequence[str]) -> list[Entry]:
    """Those that are sound, the oldest first."""
    return [entry for each in chain if (entry := _entry(_object(each))) is not None]


def _object(entry: str) -> dict[str, Any]:
    try:
        content = json.loads(entry)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _entry(content: dict[str, Any]) -> Entry | None:
    numbers = {name: whole(content.get(name)) for name in ("after", "last", "ranks")}
    date, outcome = real(content.get("date")), text(content.get("outcome"))
    if date is None or outcome not in (*COMPARED, NOT_COMPARED) or any(n is None or n < 0 for n in numbers.values()):
        return None
    known: dict[str, Any] = {**numbers, "outcome": outcome, "why": text(content.get("why")), "date": date}
    return Entry(**known)


# --- what it says of a job ---


@dataclass(frozen=True)
class Proof:
    """What is known of resumes of a job."""

    exact: bool | None
    """True: compared steps were equal, and nothing is known against it. None: not proved yet. False: no."""
    words: str
    """``proved: ...``, ``not proved yet: ...`` or ``no: ...``."""


def proof_of(chains: Sequence[Sequence[str]], against: Sequence[str]) -> Proof:
    """`chains`: of the files of all ranks of a step. `against`: what is known against an exact resume."""
    if against:
        return Proof(False, f"no: {against[0]}")
    ranks = [entries_of(chain) for chain in chains]
    joined, open_ends = [], []
    for after in sorted({entry.after for entries in ranks for entry in entries}):
        found = [entry for entries in ranks for entry in entries if entry.after == after]
        worst = next((entry for entry in found if entry.outcome != COMPARED[0]), None)
        if worst is None and len(found) >= len(ranks):
            joined.append(found[0])
        else:
            open_ends.append(f"after step {after}: {'not on all ranks' if worst is None else worst.words}")
    if not joined:
        return Proof(None, f"not proved yet: {open_ends[-1] if open_ends else 'the job was not resumed yet'}")
    newest = joined[-1]
    spans = ", ".join(entry.span for entry in joined[-4:])
    earlier = f" and {len(joined) - 4} before" if len(joined) > 4 else ""
    rest = f"; {open_ends[-1]}" if open_ends else ""
    s = "s" * (newest.ranks != 1)
    return Proof(True, f"proved: {spans}{earlier} ({newest.ranks} rank{s}, {date_of(newest.date)}){rest}")


def date_of(seconds: float) -> str:
    """The day, in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d}"
    except (OverflowError, ValueError, OSError):  # a header may hold any number
        return "at a time that no calendar has"
