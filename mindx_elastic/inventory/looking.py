"""What one rank finds: on its disks, in its machine's memory, and in its own boundary ring.

Ranks that have the same disks before them share the work: thousands of ranks do not each read thousands of headers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust
from mindx_elastic.inventory.facts import Strategies, facts_of
from mindx_elastic.inventory.views import START_TIMEOUT_S, Sight, Transport, key_of
from mindx_elastic.memory.known_runs import Claim, claim_of, known_runs, usable_runs
from mindx_elastic.memory.memory_files import own_rings, own_states, snapshot_entries
from mindx_elastic.persist.catalog import CatalogEntry, find_files, read_entry
from mindx_elastic.persist.storage import quarantine, quarantined
from mindx_elastic.plan.facts import Rejected

__all__ = ["look"]


def look(
    directories: Sequence[Path],
    ranks: RankInfo,
    exchange: Exchange,
    *,
    only: Moment | None,
    arenas: Path | None,
    transport: Transport | None,
    trust: Trust,
) -> Sight:
    """Main thread, all ranks together. `only`: files of other steps count for nothing but the number of attempts."""
    sight = Sight(attempt=ranks.attempt)
    files, unlisted = _list(directories, sight)
    digests = exchange.gather("listing", _digest(files), START_TIMEOUT_S)
    sight.group = tuple(rank for rank, digest in enumerate(digests) if digest == digests[ranks.rank])
    strategies = Strategies()
    mine = [*files][sight.group.index(ranks.rank) :: len(sight.group)]
    found_entries = (read_entry(path, owners=trust.of(files[path])) for path in mine)
    entries = [entry for entry in found_entries if entry is not None]
    if sight.group[0] == ranks.rank:
        entries += unlisted
    on_disk = [entry for entry in entries if _is_usable(entry, files.get(entry.path), sight)]
    in_memory = _in_memory(directories, arenas, on_disk, exchange, trust)
    for entry in (*on_disk, *in_memory):
        info = entry.info
        assert info is not None
        sight.attempts[info.run_id] = max(info.attempt, sight.attempts.get(info.run_id, 0))
        if info.coordinates.get("foreseen") == 0:
            sight.unforeseen.add(info.moment)
    for found, kept in ((on_disk, sight.facts), (in_memory, sight.in_memory)):
        facts, rejected = facts_of(found, strategies)
        where = digests[ranks.rank] if found is on_disk else os.uname().nodename
        kept += [replace(fact, where=where) for fact in facts if only in (None, fact.moment)]
        sight.rejected += rejected
    if transport is not None:
        places = {key_of(fact): transport.locate(Path(fact.path), fact.rank) for fact in sight.facts}
        sight.places = {key: place for key, place in places.items() if place is not None}
    for ring in own_rings([*directories], arenas, ranks.rank):
        for moment, own in own_states(ring, trust.of(ring)).items():
            sight.own.setdefault(moment, own)
    return sight


def _in_memory(
    directories: Sequence[Path], arenas: Path | None, on_disk: Sequence[CatalogEntry], exchange: Exchange, trust: Trust
) -> list[CatalogEntry]:
    """The snapshots of this machine that may be used, by what all ranks know of the runs that they are of."""
    snapshots = [] if arenas is None else snapshot_entries(arenas)
    known: dict[str, float] = {}
    claim = None
    if snapshots and arenas is not None:
        known = known_runs(directories, {entry.info.run_id for entry in snapshots if entry.info is not None}, trust)
        claim = claim_of(arenas, directories[0])
    for entry in on_disk:
        if (info := entry.info) is not None:
            known[info.run_id] = max(info.created, known.get(info.run_id, 0.0))
    own = json.dumps([known, None if claim is None else [claim.run_id, claim.began]])
    texts = exchange.gather("runs", own, START_TIMEOUT_S)
    claims = []
    with making_sense("the runs that the ranks know"):
        for text in texts:
            theirs, claimed = json.loads(text)
            for run, last in theirs.items():
                known[run] = max(float(last), known.get(run, 0.0))
            claims += [] if claimed is None else [Claim(str(claimed[0]), float(claimed[1]))]
    usable = usable_runs(known, claims)
    return [entry for entry in snapshots if entry.info is not None and entry.info.run_id in usable]


def _list(directories: Sequence[Path], sight: Sight) -> tuple[dict[Path, Path], list[CatalogEntry]]:
    """The files to look at, each with the directory that it was found in; and folders that cannot be listed."""
    files: dict[Path, Path] = {}
    unlisted: list[CatalogEntry] = []
    for directory in directories:
        sight.other |= bool(quarantined(directory))
        sight.anything |= sight.other
        for found in find_files(directory) if directory.is_dir() else ():
            if isinstance(found, Path):
                files.setdefault(found, directory)
            else:
                unlisted.append(found)
    return files, unlisted


def _digest(files: dict[Path, Path]) -> str:
    """Equal for two ranks only if they have the same files before them, not only files of the same names."""
    digest = xxhash.xxh3_128()
    for path in files:
        try:
            status = os.lstat(path)
        except OSError:
            continue
        digest.update(
            f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def _is_usable(entry: CatalogEntry, directory: Path | None, sight: Sight) -> bool:
    """Whether the header is good; notes what is bad, and puts it in quarantine where a checkpoint of ours should be."""
    # Somebody else's file under a name of its own (pretrained weights) is none of our business.
    ours = entry.info is not None or entry.looks_ours or not entry.foreign
    sight.anything |= ours
    sight.other |= ours and (entry.info is None or not entry.info.resumable)
    if entry.info is not None:
        return True
    if entry.owner is not None:
        # Not put aside: it is not ours to move, and may be sound for whoever runs this job under another user next.
        if not entry.foreign:
            sight.rejected.append(Rejected(str(entry.path), entry.problem or "is another user's"))
        logger.warning("%s is left out: it %s", entry.path, entry.problem)
        return False
    if entry.foreign and not entry.looks_ours:
        logger.info("%s is not a checkpoint of this package and is left alone", entry.path)
        return False
    sight.rejected.append(Rejected(str(entry.path), entry.problem or "unreadable"))
    if entry.looks_ours and directory is not None and not entry.path.is_dir():
        try:
            target = quarantine(entry.path, entry.problem or "unreadable", directory)
            logger.warning("%s is put aside in %s: %s", entry.path, target, entry.problem)
            return False
        except OSError as error:
            logger.warning("%s cannot be moved to the quarantine (%s)", entry.path, error)
    logger.warning("%s is not used: %s", entry.path, entry.problem)
    return False
