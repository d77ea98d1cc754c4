"""The certificate of a run: one entry for each resume, and what its comparison has shown.

Each entry is a JSON text in the header of every later file, the oldest first. An entry claims the compared steps and no
more. The last `MOST` are kept. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from mindx_elastic.core.fields import read_text
from mindx_elastic.core.printable import counted, printable

__all__ = [
    "COMPARED",
    "MOST",
    "MOST_WITNESS_BYTES",
    "NOT_COMPARED",
    "WITNESS_SUFFIX",
    "CertifiedResume",
    "ResumeProof",
    "added",
    "date_of",
    "proof_of",
    "said_of",
]

MOST = 64
COMPARED = ("verified", "variables differ", "differs")
NOT_COMPARED = "not compared"
WITNESS_SUFFIX = ".witness.jsonl"
"""After the name of a checkpoint: what the stopped process has left of its next step (`prove.overlap`)."""
MOST_WITNESS_BYTES = 1 << 26
_MOST_CHARACTERS = 200
"""The longest text in an entry: a header takes an entry of 1024."""
_MOST_OF_ENTRY = 1 << 12


@dataclass(frozen=True, kw_only=True)
class CertifiedResume:
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


def added(chain: Sequence[str], *, after: int, why: str = "", **facts: Any) -> tuple[str, ...]:
    """`chain` with one entry more. It takes the place of a last one after the same boundary: no step lies between."""
    last = None if not chain else _entry(chain[-1])
    before = chain[:-1] if last is not None and last.after == after else chain
    entry = {"after": after, "why": printable(why)[:_MOST_CHARACTERS], **facts}
    return (*before, json.dumps(entry, ensure_ascii=False))[-MOST:]


def _entry(text: str) -> CertifiedResume | None:
    """None: it is none, or of a version that knows other outcomes."""
    try:
        entry = read_text(CertifiedResume, text, _MOST_OF_ENTRY)
    except ValueError:
        return None
    return entry if entry.outcome in (*COMPARED, NOT_COMPARED) else None


# --- what it says of a job ---


class ResumeProof(NamedTuple):
    """What is known of resumes of a job."""

    exact: bool | None
    """True: compared steps were equal, and nothing is known against it. None: not proved yet. False: no."""
    words: str
    """``proved: ...``, ``not proved yet: ...`` or ``no: ...``."""


def proof_of(chains: Sequence[Sequence[str]], against: Sequence[str]) -> ResumeProof:
    """`chains`: of the files of all ranks of a step. `against`: what is known against an exact resume."""
    if against:
        return ResumeProof(False, f"no: {against[0]}")
    ranks = [[entry for each in chain if (entry := _entry(each)) is not None] for chain in chains]
    joined, open_ends = [], []
    for after in sorted({entry.after for entries in ranks for entry in entries}):
        found = [entry for entries in ranks for entry in entries if entry.after == after]
        worst = next((entry for entry in found if entry.outcome != COMPARED[0]), None)
        if worst is None and len(found) >= len(ranks):
            joined.append(found[0])
        else:
            open_ends.append(f"after step {after}: {'not on all ranks' if worst is None else said_of(worst)}")
    if not joined:
        return ResumeProof(None, f"not proved yet: {open_ends[-1] if open_ends else 'the job was not resumed yet'}")
    newest = joined[-1]
    spans = ", ".join(entry.span for entry in joined[-4:])
    earlier = f" and {len(joined) - 4} before" if len(joined) > 4 else ""
    rest = f"; {open_ends[-1]}" if open_ends else ""
    return ResumeProof(
        True, f"proved: {spans}{earlier} ({counted(newest.ranks, 'rank')}, {date_of(newest.date)}){rest}"
    )


def said_of(entry: CertifiedResume) -> str:
    """Its outcome in words."""
    before = f"{entry.span} equal, and not got back" if entry.outcome == COMPARED[1] else entry.outcome
    return f"{before}: {entry.why}" if entry.why else before


def date_of(seconds: float) -> str:
    """The day, in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d}"
    except (OverflowError, ValueError, OSError):  # a header may hold any number
        return "at a time that no calendar has"
