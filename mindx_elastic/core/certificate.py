"""The certificate of a run: a chain with one entry for each resume, and what its comparison has shown.

Each entry is a JSON text in the header of every later file. It has the digest of the entry before, so that none can be
changed or left out unseen by accident; it is not a signature. An entry claims the compared steps and no more. The last
`MOST` are kept. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, NamedTuple

import xxhash

from mindx_elastic.core.fields import Text, read
from mindx_elastic.core.printable import printable

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
    "digest_of",
    "proof_of",
    "read_chain",
    "said_of",
]

MOST = 64
COMPARED = ("verified", "variables differ", "differs")
NOT_COMPARED = "not compared"
WITNESS_SUFFIX = ".witness.jsonl"
"""After the name of a checkpoint: what the stopped process has left of its next step (`prove.overlap`)."""
MOST_WITNESS_BYTES = 1 << 26
_Digest = Annotated[str, Text(32, "[0-9a-f]{32}|")]
_MOST_CHARACTERS = 200
"""The longest text in an entry: a header takes an entry of 1024."""


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
    boundary: _Digest = ""
    """Digest of the header of the boundary's file."""
    witness: _Digest = ""
    """xxh3-128 of the file that the stopped process has left of its next step."""
    version: str = ""
    """The version of this package."""
    torch: str = ""
    device: str = ""
    ranks: int
    date: float
    """Unix seconds."""
    before: _Digest
    """Digest of the entry before; empty: it is the first."""

    @property
    def span(self) -> str:
        return f"step {self.last}" if self.last <= self.after + 1 else f"steps {self.after + 1} to {self.last}"


def digest_of(entry: str) -> str:
    """The digest of an entry's text."""
    return xxhash.xxh3_128_hexdigest(entry.encode("utf-8", "surrogatepass"))


def added(chain: Sequence[str], *, after: int, why: str = "", **facts: Any) -> tuple[str, ...]:
    """`chain` with one entry more. It takes the place of a last one after the same boundary: no step lies between."""
    texts = list(chain)
    if texts and _object(texts[-1]).get("after") == after:
        texts.pop()
    entry = {"after": after, "why": printable(why)[:_MOST_CHARACTERS], **facts}
    texts.append(json.dumps({**entry, "before": digest_of(texts[-1]) if texts else ""}, ensure_ascii=False))
    return tuple(texts[-MOST:])


def read_chain(chain: Sequence[str]) -> list[CertifiedResume]:
    """The entries, the oldest first. Raises ValueError where the chain is broken, with the place."""
    entries: list[CertifiedResume] = []
    before, step = "", 0
    for number, each in enumerate(chain, start=1):
        where = f"entry {number}"
        entry = _entry(_object(each))
        if entry is None:
            raise ValueError(f"{where} is not an entry of a certificate")
        is_cut = number == 1 and len(chain) >= MOST
        if entry.before != before and not is_cut:
            raise ValueError(f"{where} does not follow the one before it: one of them was changed, or is missing")
        if entry.after < step or entry.last < entry.after:
            raise ValueError(f"{where} goes back: from step {step} to {entry.after}")
        entries.append(entry)
        before, step = digest_of(each), entry.after
    return entries


def _object(entry: str) -> dict[str, Any]:
    try:
        content = json.loads(entry)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _entry(content: dict[str, Any]) -> CertifiedResume | None:
    try:
        entry = read(CertifiedResume, content)
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
    try:
        ranks = [read_chain(chain) for chain in chains]
    except ValueError as error:
        return ResumeProof(None, f"not proved yet: the certificate is broken: {error}")
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
    s = "s" * (newest.ranks != 1)
    return ResumeProof(True, f"proved: {spans}{earlier} ({newest.ranks} rank{s}, {date_of(newest.date)}){rest}")


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
