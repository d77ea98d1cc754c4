"""Checks the certificate of a job: which of its resumes are joined to the process before by compared steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindx_elastic.core.certificate import (
    COMPARED,
    MOST_WITNESS_BYTES,
    WITNESS_SUFFIX,
    CertifiedResume,
    date_of,
    digest_of,
    proof_of,
    read_chain,
    said_of,
)
from mindx_elastic.core.owners import open_trusted
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.start.facts import Refusal, World
from mindx_elastic.start.findings import list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory
from mindx_elastic.start.planner import newest_world_size

if TYPE_CHECKING:
    from mindx_elastic.core.owners import Owners
    from mindx_elastic.persist.catalog import CatalogEntry

__all__ = ["certificate_in"]


def certificate_in(directory: Path) -> dict[str, Any]:
    """The certificate of the newest complete step in `directory`, JSON-able: ``step`` (None: there is none), ``sound``,
    ``proof``, ``spans`` (a line for each resume, the oldest first), ``problems`` (what is broken), ``conclusion``."""
    trust = reader_trust(directory)
    inventory = Inventory.merge([scan(list_files([directory], None), trust=trust)])
    plan = inventory.plan(World(newest_world_size(inventory.facts) or 1))
    if isinstance(plan, Refusal):
        problems = inventory.lines(None, plan.reasons)[:8] if inventory.anything else []
        conclusion = "no step can be used" if problems else "no checkpoint was found"
        return {"step": None, "sound": None, "proof": None, "spans": [], "problems": problems, "conclusion": conclusion}
    chains: dict[int, Sequence[str]] = {}
    for share in plan.ranks:
        entry = inventory.entries.get(share.file.path)
        if entry is not None and entry.info is not None:
            chains[entry.info.rank] = entry.info.certificate
    problems, read, left_out = [], dict[int, list[CertifiedResume]](), 0
    for rank, chain in chains.items():
        try:
            read[rank], left_out = read_chain(chain)
        except ValueError as error:
            problems.append(f"rank {rank}: {error}")
            continue
        for found in read[rank]:
            if found.last > plan.step:
                problems.append(f"rank {rank}: it claims {found.span}, and its file is of step {plan.step}")
    problems += _changed_witnesses(list(inventory.entries.values()), read, trust.of(directory))
    spans, num_joined = _spans(read)
    lines = [f"{left_out} earlier resumes are left out of this step's headers"] if left_out else []
    state = "BROKEN" if problems else "sound"
    return {
        "step": plan.step,
        "sound": not problems,
        "proof": proof_of(list(chains.values()), (*plan.inexact, *plan.unmanaged)).words,
        "spans": [*lines, *spans],
        "problems": problems,
        "conclusion": f"certificate of step {plan.step}: {state}; {num_joined} of {len(spans)} resumes are joined by "
        "compared steps",
    }


def _spans(read: dict[int, list[CertifiedResume]]) -> tuple[list[str], int]:
    """A line for each resume, and how many of them are joined on all ranks."""
    lines, num_joined = [], 0
    for after in sorted({entry.after for entries in read.values() for entry in entries}):
        found = {rank: entry for rank, entries in read.items() for entry in entries if entry.after == after}
        bad = {rank: entry for rank, entry in found.items() if entry.outcome != COMPARED[0]}
        if bad or len(found) < len(read):
            rank = min(bad, default=min(read.keys() - found.keys(), default=0))
            where = f" on {rank_list(sorted(bad))}" if 0 < len(bad) < len(read) else ""
            why = said_of(bad[rank]) if bad else f"{rank_list(sorted(read.keys() - found.keys()))} has no entry"
            lines.append(f"resumed after step {after}: NOT joined{where}: {why}")
            continue
        num_joined += 1
        first = next(iter(found.values()))
        software = f"torch {first.torch}, {first.device}, mindx_elastic {first.version}"
        s = "s" * (first.ranks != 1)
        lines.append(
            f"resumed after step {after}: joined: {first.span} was made alike by both processes "
            f"({first.ranks} rank{s}, {date_of(first.date)}, {software})"
        )
    return lines, num_joined


def _changed_witnesses(
    files: Sequence[CatalogEntry], read: dict[int, list[CertifiedResume]], owners: Owners
) -> Iterator[str]:
    """The witnesses that are still there and are not those that were compared."""
    claimed = {entry.boundary: entry for entries in read.values() for entry in entries if entry.boundary}
    for file in files:
        entry = None if file.header is None else claimed.get(file.header.digest)
        path = file.path.with_name(file.path.name + WITNESS_SUFFIX)
        if entry is None or not path.exists():
            continue
        content = b""
        with suppress(OSError), open(open_trusted(path, owners), "rb") as opened:
            content = opened.read(MOST_WITNESS_BYTES)
        if digest_of(content.decode(errors="replace")) != entry.witness:
            yield f"{path}: not the one that {entry.span} was compared with"
