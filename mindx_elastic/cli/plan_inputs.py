"""What ``mindx-elastic plan`` tells the planner: files and faults. And the check of digests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindx_elastic.cli.verify import check_entries
from mindx_elastic.config import FaultPaths
from mindx_elastic.platforms.faults import Faults, default_fault_sources, merge, parse_rank_list, read_faults
from mindx_elastic.start.facts import FileFact, KnownFaults, Refusal, Rejected, ResumePlan, World

if TYPE_CHECKING:
    from mindx_elastic.core.owners import Owners
    from mindx_elastic.persist.catalog import CatalogEntry
    from mindx_elastic.start.inventory import Inventory

__all__ = ["Checked", "find", "gather_faults", "plan_and_check"]


# --- files ---


def find(directory: Path) -> Inventory:
    """Look at every header under `directory`, and at the small states next to the checkpoints."""
    from mindx_elastic.start.findings import list_files, reader_trust, scan
    from mindx_elastic.start.inventory import Inventory

    findings = scan(list_files([directory]), trust=reader_trust(directory))
    if not findings.facts:
        findings.rejected += _leftovers(directory, findings.entries.values())
    return Inventory.merge([findings])


def _leftovers(directory: Path, entries: Iterable[CatalogEntry]) -> list[Rejected]:
    """What is no reason to plan, and keeps a start from being a fresh one."""
    from mindx_elastic.persist.storage import quarantined

    found = [
        Rejected(str(entry.path), f"is not meant for resuming ({entry.info.kind})")
        for entry in entries
        if entry.info is not None and not entry.info.resumable
    ]
    aside = len(quarantined(directory))
    if aside:
        text = f"{aside} file{'s' * (aside > 1)} that could not be used (the .reason.txt next to each says why)"
        found.append(Rejected(f"{directory}/quarantine", text))
    return found


# --- faults ---


def gather_faults(report: str | None, ranks: str | None, world_size: int | None) -> Faults:
    """All that is said to be faulty. `report`: a path, or ``none``; None: what the platform has mounted, if anything.

    Raises UsageError for whatever is not understood in full, and for ranks that a job of `world_size` does not have.
    """
    if report is None:
        sources: Sequence[Path] = default_fault_sources(FaultPaths.from_env())
    else:
        sources = () if report == "none" else (Path(report),)
    faults = Faults()
    for source in sources:
        faults = merge(faults, read_faults(source, world_size=world_size))
    if ranks is not None:
        typed = Faults(parse_rank_list(ranks, world_size=world_size), source="--fault-ranks")
        faults = merge(faults, typed)
    return faults


# --- plan, check, plan again ---


@dataclass
class Checked:
    """What was read to compare digests."""

    files: int = 0
    nbytes: int = 0


def plan_and_check(
    directory: Path, found: Inventory, world: World, faults: KnownFaults, step: int | None
) -> tuple[ResumePlan | Refusal, Checked]:
    """A plan whose files have been read and match their digests: a damaged one is dropped, the rest planned again."""
    from mindx_elastic.start.findings import reader_trust
    from mindx_elastic.start.inventory import until_sound

    checked, seen = Checked(), set[str]()
    owners = reader_trust(directory).of(directory)

    def check(plan: ResumePlan | Refusal) -> Iterator[tuple[None, FileFact, str]]:
        facts = [] if isinstance(plan, Refusal) else [fact for fact in _files_used(plan) if fact.path not in seen]
        entries = [found.entries[fact.path] for fact in facts]
        for fact, entry, problems in zip(facts, entries, check_entries(entries, owners), strict=True):
            seen.add(fact.path)
            checked.files += 1
            checked.nbytes += entry.size
            problem = "; ".join(problems) or _changed(entry, owners)
            if problem:
                yield None, fact, problem

    def plan() -> ResumePlan | Refusal:
        return found.plan(world, faults, step=step)

    return until_sound(found, plan, check), checked


def _files_used(plan: ResumePlan) -> list[FileFact]:
    """All files that a start may read: those of the ranks, then the first of each old rank for those that assemble."""
    found = {fact.path: fact for share in plan.ranks for fact in (share.file, *share.others)}
    if any(share.assembled for share in plan.ranks):
        found |= {facts[0].path: facts[0] for facts in plan.files.values()}
    return list(found.values())


def _changed(entry: CatalogEntry, owners: Owners) -> str:
    """A running job may replace a file between the look at its header and the reading."""
    from mindx_elastic.persist.catalog import read_entry

    return "" if read_entry(entry.path, entry, owners) is entry else "was replaced while it was looked at; call again"
