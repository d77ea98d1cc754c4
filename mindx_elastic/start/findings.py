"""Finds what one process can resume from on its disks and in its machine's memory: `list_files`, then `scan`.

Both only read. Processes that see the same files (`Listing.disk`, `Listing.machine`) can share the reading of the
headers; each then scans its share, and `Inventory.merge` merges the findings. A start moves damaged files to quarantine
afterwards, with `put_aside`; other callers leave them where they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import xxhash

from mindx_elastic.config import SharingSettings
from mindx_elastic.core.events import EVENTS_FILE, logger
from mindx_elastic.core.fields import Text, Words, read, read_value
from mindx_elastic.core.layout import MAX_RANKS
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust, user_ids
from mindx_elastic.core.posix import boot_id
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.memory.boundaries import OwnState
from mindx_elastic.memory.folders import rank_folders
from mindx_elastic.memory.memory_files import RING_COPY, known_runs, own_rings, own_states, snapshot_files
from mindx_elastic.persist.catalog import CatalogEntry, find_files, rank_of_folder, read_entry
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.shared_json import SharedJson
from mindx_elastic.persist.storage import quarantine, quarantined
from mindx_elastic.start.facts import FileFact, Rejected
from mindx_elastic.start.file_facts import Strategies, facts_of
from mindx_elastic.start.odd_steps import ODD_STEPS, OddStep, read_odd_steps

__all__ = [
    "Archive",
    "ArchivedFile",
    "Findings",
    "Listing",
    "Place",
    "Share",
    "Transport",
    "add_archived",
    "list_files",
    "put_aside",
    "reader_trust",
    "scan",
    "to_quarantine",
]

Place = tuple[int, Annotated[str, Text(1 << 16)]]
"""Index of a directory, or of the job's memory, and path in it; the same on every rank."""
Share = tuple[int, int]
"""(n, count): every count-th file, from the n-th on."""
EVERYTHING: Share = (0, 1)


class Transport(Protocol):
    """Carries files between ranks; the package's own implementation is `mirror.mirror.Mirror`."""

    def locate(self, path: Path, rank: int) -> Place | None:
        """The place of a file of `rank`, the same on every rank: index of the directory and path in it."""

    def fetch(self, holder: int, root: int, name: str) -> Path:
        """Copy a file of this rank from another rank; returns its path. Raises OSError or CheckpointError."""


class ArchivedFile(NamedTuple):
    """A file in an archive, known by its header."""

    address: str
    """URL."""
    entry: CatalogEntry
    """`path`: where it belongs on disk."""


class Archive(Protocol):
    """A second place that all ranks see; the package's own is `archive.archive.Archive`."""

    def look(self) -> Sequence[ArchivedFile]:
        """The files of this rank's share; all ranks together see all. Raises OSError."""

    def leave(self) -> None:
        """Some rank could not look: nothing may be written to it."""

    def fetch(self, address: str, path: Path) -> bool:
        """Get a file to its place; False: it was there. Raises OSError or CheckpointError."""


class Listing(NamedTuple):
    """The files that one process sees; their headers are not read yet."""

    directories: tuple[Path, ...]
    files: Mapping[Path, Path]
    """File -> the directory that it was found in."""
    unlisted: tuple[CatalogEntry, ...] = ()
    """Folders that cannot be listed."""
    arenas: Path | None = None
    """The job's folder in shared memory."""
    disk: str = ""
    """Equal for two processes only if they see the same files on disk, not only files of the same names."""
    machine: str = ""
    """Equal for two processes only if that folder is the same one."""


def _digest(paths: Iterable[Path]) -> str:
    """The digest of all but the event log, which grows while the ranks meet."""
    digest = xxhash.xxh3_128()
    for path in paths:
        if path.name.startswith(EVENTS_FILE):
            continue
        try:
            status = os.lstat(path)
        except OSError:
            continue
        line = f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def list_files(directories: Sequence[Path], arenas: Path | None = None) -> Listing:
    """List the files to scan; those in memory are listed by `scan`. Any thread; blocks on the disk."""
    files: dict[Path, Path] = {}
    unlisted: list[CatalogEntry] = []
    for directory in directories:
        for found in find_files(directory) if directory.is_dir() else ():
            if isinstance(found, Path):
                files.setdefault(found, directory)
            else:
                unlisted.append(found)
    return Listing(tuple(directories), files, tuple(unlisted), arenas, _digest(files), _machine_of(arenas))


def _machine_of(arenas: Path | None) -> str:
    try:
        status = None if arenas is None else os.stat(arenas)
        return "" if status is None else f"{boot_id()}:{status.st_dev}:{status.st_ino}"
    except OSError:  # there is no such job, or no /proc
        return f"{os.uname().nodename}:{arenas}"


@dataclass
class Findings:
    """What one process has found. `encode` sends it to other ranks, but for the fields that are not for `__init__`."""

    attempt: int = 0
    """The attempt, as the launcher counts it."""
    disk: str = ""
    machine: str = ""
    facts: list[FileFact] = field(default_factory=list)
    """Facts of the files on disk; all processes with the same `disk` see them."""
    in_memory: list[FileFact] = field(default_factory=list)
    """Facts of the snapshots; all processes with the same `machine` see them."""
    places: dict[Annotated[str, Text(1 << 16)], Place] = field(default_factory=dict)
    """By path, the places of files that other ranks can fetch from this one."""
    own: dict[int, dict[Moment, OwnState]] = field(default_factory=dict)
    """By rank, its own small states of steps, to be combined with a donor's file. `encode` omits the bytes."""
    unforeseen: set[Moment] = field(default_factory=set)
    """Boundaries that differ from their forecasts, according to some rank's file."""
    foreseen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Run -> attempt and step of its newest boundary that has come out as forecast, according to some rank's file."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Highest attempt of each run, in memory or on disk."""
    known: set[str] = field(default_factory=set)
    """The runs that appear in files and event logs on disk."""
    odd: list[OddStep] = field(default_factory=list)
    """Steps whose loss was no number, according to the directories."""
    rejected: list[Rejected] = field(default_factory=list)
    """Files that cannot be used, or not by every rank."""
    anything: bool = False
    """There are, or were, files of ours on disk."""
    other: bool = False
    """Some of them are not sound files of a step, so it is unknown what they were."""
    in_archive: list[FileFact] = field(default_factory=list)
    """Facts of files in the archive; all processes see them."""
    unread_archive: Annotated[str, Words(500)] = ""
    """Why it is not known what is in the archive."""
    generation: int = 0
    """The highest one in the archive."""
    entries: dict[str, CatalogEntry] = field(default_factory=dict, init=False)
    """Catalog entries of all files that were read, by path."""

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The strategies of all facts, by digest: they are large and few, and are sent separately from `encode`."""
        found = {id(fact.strategy): fact.strategy for fact in (*self.facts, *self.in_memory, *self.in_archive)}
        return {strategy.digest: strategy for strategy in found.values()}

    def encode(self) -> str:
        """Encode as compact JSON; `decode` is the inverse. Strategies are replaced by their digests."""
        digests: dict[int, str] = {}  # a strategy's own one goes through all its tensors

        def row(fact: FileFact) -> list[Any]:
            strategy = digests.get(id(fact.strategy)) or digests.setdefault(id(fact.strategy), fact.strategy.digest)
            return [strategy, *(getattr(fact, name) for name in _ROW)]

        own = [
            (rank, moment, state.forecast, state.trusted)
            for rank, states in self.own.items()
            for moment, state in states.items()
        ]
        content = {each.name: value for each in fields(self) if each.init and (value := getattr(self, each.name))}
        content |= {"disk": self.disk, "machine": self.machine, "own": own}
        content |= {"facts": list(map(row, self.facts)), "in_memory": list(map(row, self.in_memory))}
        content["in_archive"] = [(fact.where, row(fact)) for fact in self.in_archive]
        return json.dumps(content, separators=(",", ":"), default=lambda v: sorted(v) if type(v) is set else asdict(v))

    @classmethod
    def decode(cls, text: str, strategies: Mapping[str, Strategy]) -> Findings:
        """Decode another process's findings. `strategies`: those of all processes, by digest.

        Raises ValueError, KeyError or TypeError for a text that `encode` cannot produce.
        """
        content = json.loads(text)
        own: dict[int, dict[Moment, OwnState]] = {}
        for rank, moment, *said in read_value(list[tuple[int, Moment, bool, bool]], content["own"], "own"):
            own.setdefault(rank, {})[moment] = OwnState(b"", *said)
        facts = [_fact(row, strategies, content["disk"]) for row in content["facts"]]
        in_memory = [_fact(row, strategies, content["machine"]) for row in content["in_memory"]]
        in_archive = [_fact(row, strategies, str(where)) for where, row in content["in_archive"]]
        return read(cls, content, facts=facts, in_memory=in_memory, in_archive=in_archive, own=own)


_ROW = [each.name for each in fields(FileFact) if each.name not in ("strategy", "visible_to", "where")]


def _fact(row: Sequence[Any], strategies: Mapping[str, Strategy], where: str) -> FileFact:
    """Decode the facts of one file. Raises ValueError for a row that cannot come from a header."""
    strategy, *values = row
    found = read(FileFact, dict(zip(_ROW, values, strict=True)), strategy=strategies[strategy], where=where)
    if not found.rank < found.world_size <= MAX_RANKS:
        raise ValueError(f"rank {found.rank} of {found.world_size}")
    return found


# --- scanning ---


def reader_trust(path: Path) -> Trust:
    """The users whose files count at `path`, a file or a directory, for commands that only read: the same as for a
    start, with MINDX_TRUSTED_USERS.

    Makes no file, so on a file system with mapped users it does not learn our own mapped id. Raises UsageError.
    """
    trust = Trust(trusted=user_ids(SharingSettings.from_env().trusted_users))
    trust.roots[path] = trust.of(path)
    return trust


def scan(
    listing: Listing,
    *,
    trust: Trust,
    rank: int | None = None,
    only: Moment | None = None,
    share: Share = EVERYTHING,
    memory_share: Share = EVERYTHING,
    snapshots: Sequence[Path] | None = None,
    transport: Transport | None = None,
    attempt: int = 0,
) -> Findings:
    """Read the headers of (a share of) the files in `listing`, and the small states of `rank`, or of all ranks.

    only: use files of other steps for the number of attempts only. snapshots: the files in memory to read; None: all.
    transport: gives the places from which other ranks can fetch the files. Changes nothing; any thread; blocks on the
    disk.
    """
    found = Findings(attempt=attempt, disk=listing.disk, machine=listing.machine)
    # One process of those that see the same files looks into the quarantine.
    found.other = found.anything = share[0] == 0 and any(map(quarantined, listing.directories))
    shared = SharedJson()
    on_disk = _read_files(listing, share, trust, shared, found)
    if snapshots is None:
        snapshots = [] if listing.arenas is None else snapshot_files(listing.arenas)
    in_memory = [entry for path in snapshots[memory_share[0] :: memory_share[1]] if (entry := _sound(path, shared))]
    for entry in (*on_disk, *in_memory):
        found.entries[str(entry.path)] = entry
        if entry.info is not None:
            _note(entry.info, found)
    strategies = Strategies(shared)
    found.facts = _facts(on_disk, strategies, found.disk, only, found)
    found.in_memory = _facts(in_memory, strategies, found.machine, only, found)
    if transport is not None:
        files = (*found.facts, *found.in_memory)
        places = {fact.path: transport.locate(Path(fact.path), fact.rank) for fact in files}
        found.places = {path: place for path, place in places.items() if place is not None}
    for path in listing.files if share[0] == 0 else ():
        if path.name.startswith(ODD_STEPS):
            found.odd += read_odd_steps(path, trust.of(path.parent)).steps
    _find_own_states(listing, rank, trust, found)
    _find_known_runs(listing, on_disk, in_memory, trust, found)
    return found


def _note(info: CheckpointInfo, found: Findings) -> None:
    """What a header says besides what its file holds."""
    found.attempts[info.run_id] = max(info.attempt, found.attempts.get(info.run_id, 0))
    foreseen = info.coordinates.get("foreseen")
    if foreseen == 0:
        found.unforeseen.add(info.moment)
    elif foreseen == 1:
        newest = found.foreseen.get(info.run_id, (-1, -1))
        found.foreseen[info.run_id] = max(newest, (info.attempt, info.step))


def add_archived(found: Findings, archive: Archive, *, counts: bool) -> None:
    """Add what the archive has. `counts`: a start may go on from it; else it only says which numbers are taken."""
    try:
        files = archive.look()
    except OSError as error:
        found.unread_archive = str(error)
        return
    strategies = Strategies()
    for address, entry in files:
        assert entry.info is not None
        _note(entry.info, found)
        found.generation = max(found.generation, entry.info.generation)
        if not counts:
            continue
        found.known.add(entry.info.run_id)
        found.anything = True
        found.entries.setdefault(str(entry.path), entry)
        facts, rejected = facts_of([entry], strategies)
        found.rejected += rejected
        found.in_archive += [replace(fact, where=address) for fact in facts]


def _sound(path: Path, shared: SharedJson) -> CatalogEntry | None:
    entry = read_entry(path, shared=shared)
    return None if entry is None or entry.info is None else entry


def _facts(
    entries: Sequence[CatalogEntry], strategies: Strategies, where: str, only: Moment | None, found: Findings
) -> list[FileFact]:
    facts, rejected = facts_of(entries, strategies)
    found.rejected += rejected
    return [replace(fact, where=where) for fact in facts if only in (None, fact.moment)]


def _read_files(
    listing: Listing, share: Share, trust: Trust, shared: SharedJson, found: Findings
) -> list[CatalogEntry]:
    """The entries of this share of the files, bad ones included; problems go to `found`."""
    entries = list(listing.unlisted) if share[0] == 0 else []
    owners = {directory: trust.of(directory) for directory in listing.directories}
    for path in [*listing.files][share[0] :: share[1]]:
        entry = read_entry(path, owners=owners[listing.files[path]], shared=shared)
        if entry is not None:
            entries.append(entry)
    for entry in entries:
        # Ignore another program's file under its own name (pretrained weights).
        ours = entry.info is not None or entry.looks_ours or not entry.foreign
        found.anything |= ours
        found.other |= ours and (entry.info is None or not entry.info.resumable)
    return entries


def _find_own_states(listing: Listing, rank: int | None, trust: Trust, found: Findings) -> None:
    ranks = [rank] if rank is not None else _ranks_with_rings(listing)
    for each in ranks:
        for ring in own_rings(listing.directories, listing.arenas, each):
            for moment, own in own_states(ring, trust.of(ring)).items():
                found.own.setdefault(each, {}).setdefault(moment, own)


def _ranks_with_rings(listing: Listing) -> list[int]:
    folders = [path.parent for directory in listing.directories for path in directory.glob(f"rank_*/{RING_COPY}")]
    ranks = {rank for folder in folders if (rank := rank_of_folder(folder)) is not None}
    return sorted(ranks | set(rank_folders(listing.arenas) if listing.arenas is not None else ()))


def _find_known_runs(
    listing: Listing,
    on_disk: Sequence[CatalogEntry],
    in_memory: Sequence[CatalogEntry],
    trust: Trust,
    found: Findings,
) -> None:
    """Find the runs on disk; if there is memory to judge, also the runs in event logs."""
    wanted = {entry.info.run_id for entry in in_memory if entry.info is not None}
    wanted |= {moment[0] for states in found.own.values() for moment in states}
    if listing.arenas is not None and rank_folders(listing.arenas):
        found.known = known_runs(listing.directories, wanted, trust)
    found.known |= {entry.info.run_id for entry in on_disk if entry.info is not None}


def put_aside(found: Findings, listing: Listing) -> None:
    """Move the damaged files of `found` to the quarantines of their directories, and log what is left out. For starts
    only: main thread, after all ranks have listed the files."""
    for entry in found.entries.values():
        if entry.info is not None:
            continue
        if entry.owner is not None:  # another user's is not moved: it may be sound for a job that runs as that user
            logger.warning("%s is left out: it %s", entry.path, entry.problem)
        elif entry.foreign and not entry.looks_ours:
            logger.info("%s is not a checkpoint of this package and is left alone", entry.path)
        elif entry.looks_ours and entry.path in listing.files and not entry.path.is_dir():
            logger.warning("%s", to_quarantine(entry.path, entry.problem or "unreadable", listing.directories))
        else:
            logger.warning("%s is not used: %s", entry.path, entry.problem)


def to_quarantine(path: Path, problem: str, directories: Sequence[Path]) -> str:
    """Move a damaged file to the quarantine of its directory; returns what is wrong, and where it is, for the log. One
    outside of `directories` is in memory, which has no quarantine: it is removed."""
    root = next((each for each in directories if path.is_relative_to(each)), None)
    try:
        if root is None:
            path.unlink(missing_ok=True)
            return f"{path} is damaged: {problem}"
        return f"{path.name} is damaged and now in {quarantine(path, problem, root).parent}: {problem}"
    except FileNotFoundError:  # all ranks that read parts of it find that at once
        return f"{path.name} is damaged, and another rank has put it aside: {problem}"
    except OSError as error:
        return f"{path.name} is damaged ({problem}) and could not be moved aside ({error})"
