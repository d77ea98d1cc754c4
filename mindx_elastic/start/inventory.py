"""Merges findings into one inventory of everything that can be resumed from, and plans from it.

All callers use it: a start (`merge` of the findings of all ranks), the holder, the command line, conversion and
retention (`merge` of one process's own findings). Pure: it reads no
files; the caller reads and verifies them, and calls `forget` for a file that could not be read.

Disks may be shared, or each node has its own under the same path. So a file is identified by its path and its disk, and
the inventory records which ranks can read it. A copy of a rank's file on another node counts as readable by that rank
if a transport can fetch it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from mindx_elastic.core.moment import Moment, moment_name
from mindx_elastic.core.printable import listed
from mindx_elastic.core.rank_lists import missing_ranks, rank_list
from mindx_elastic.memory.boundaries import OwnState
from mindx_elastic.persist.catalog import CatalogEntry, kind_place, preference
from mindx_elastic.start.assumptions import settle_assumptions
from mindx_elastic.start.candidate import Candidate, Context
from mindx_elastic.start.facts import FileFact, KnownFaults, Refusal, Rejected, ResumePlan, World
from mindx_elastic.start.file_facts import facts_of
from mindx_elastic.start.findings import Findings, Place
from mindx_elastic.start.odd_steps import OddStep, without_odd_steps
from mindx_elastic.start.planner import order_of_moments, plan_resume
from mindx_elastic.start.unused_state import RecordedSaves

__all__ = ["Inventory", "SavedStep", "newest_complete", "until_sound"]

T = TypeVar("T")
Key = tuple[str, str, int, Moment, str, float, int]
"""Identifies one file on one disk."""


def _key_of(fact: FileFact) -> Key:
    return fact.where, fact.path, fact.rank, fact.moment, fact.kind, fact.created, fact.nbytes


@dataclass
class _File:
    fact: FileFact
    seen_by: frozenset[int]
    """The ranks that can read it themselves."""
    places: dict[int, Place] = field(default_factory=dict)
    """By holding rank, the place from which others can fetch it."""


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """One step of one attempt of one run, and whether a start of the same world size can resume from it.

    It asks the planner only when the files alone do not decide, so that a few small files that claim a huge world size
    stay cheap.
    """

    moment: Moment
    world_size: int
    """The one of the newest file, if they disagree."""
    facts: tuple[FileFact, ...]
    """Its files that can be resumed from, by rank, and within a rank in the order in which to try them."""
    entries: tuple[CatalogEntry, ...]
    """All its files that this process has read, in the same order; files that cannot be resumed from come last."""
    own_states: Collection[int]
    """The ranks that have their own small state of it."""

    @property
    def missing_ranks(self) -> Sequence[int]:
        """Ranks without their own file to resume from."""
        return missing_ranks(self.world_size, self.ranks)

    @property
    def ranks(self) -> set[int]:
        """The ranks with a file to resume from."""
        return {fact.rank for fact in self.facts}

    @cached_property
    def candidate(self) -> Candidate:
        """This step as the planner judges it, for the same world size."""
        own_states = {self.moment: self.own_states}
        return Candidate(self.moment, self.facts, Context(World(self.world_size), frozenset(), own_states))

    @property
    def is_usable(self) -> bool:
        """Whether a start can resume from it; a rank may have to take another's file."""
        return not self.candidate.problem

    @property
    def is_complete(self) -> bool:
        """Whether a start resumes from it exactly, as an uninterrupted run would continue. Digests are not checked."""
        if missing_ranks(self.world_size, {*self.ranks, *self.own_states}):
            return False  # these ranks would begin with new random numbers at best
        return not (self.candidate.problem or self.candidate.inexact)

    @property
    def why_incomplete(self) -> str | None:
        """One line for a person; None when complete."""
        if self.is_complete:
            return None
        useless = sorted({e.info.rank for e in self.entries if e.info and not e.info.resumable} - self.ranks)
        absent = missing_ranks(self.world_size, {*self.ranks, *useless})
        parts = [f"{rank_list(absent)} of {self.world_size} missing"] if absent else []
        parts += [f"{rank_list(useless)} saved a state that cannot be resumed from"] if useless else []
        if parts and len({fact.world_size for fact in self.facts}) < 2:
            return "; ".join(parts)
        return self.candidate.problem or self.candidate.inexact[0]


class Inventory:
    """The merged findings of one or several processes. One thread at a time."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        """Number of processes with findings; those of a single process count as visible to every rank of any world."""
        self.own_states: dict[Moment, set[int]] = {}
        """For each step the ranks that have their own small state of it."""
        self.unforeseen: set[Moment] = set()
        self.foreseen: set[Moment] = set()
        self.runs: set[str] = set()
        """The runs whose snapshots may be used."""
        self.rejected: list[Rejected] = []
        self.odd: list[OddStep] = []
        """Steps that no start uses, nor what has come of them."""
        self.anything = self.other = False
        self.entries: dict[str, CatalogEntry] = {}
        """By path, the entries that this process has read itself."""
        self.unread_archive = ""
        """Why it is not known what is in the archive."""
        self.generation = 0
        """The highest one in the archive."""
        self.launched = 0
        """The highest attempt that a launcher has counted."""
        self._files: dict[Key, _File] = {}
        self._archived = False
        self._attempts: dict[str, int] = {}
        self._facts: list[FileFact] | None = None
        self._moments: dict[Moment, list[FileFact]] | None = None
        self._read: dict[Moment, list[CatalogEntry]] = {}

    @classmethod
    def merge(cls, findings: Sequence[Findings]) -> Inventory:
        """Merge the findings of all ranks of a start, in rank order; or take those of a single process.

        Raises ValueError for findings that contradict each other.
        """
        made = cls(len(findings))
        made.runs = {run for found in findings for run in found.known} - {""}
        disks, machines = _groups([each.disk for each in findings]), _groups([each.machine for each in findings])
        for found in findings:
            made._add(found, disks[found.disk], machines[found.machine])
        if made.odd:
            made._leave_out_odd_steps()
        for rank, found in enumerate(findings):
            made._add_own(found, None if len(findings) == 1 else rank)
        if made._archived:
            made._leave_out_other_writers()
        return made

    def _add(self, found: Findings, disk: frozenset[int], machine: frozenset[int]) -> None:
        in_memory = [fact for fact in found.in_memory if fact.moment[0] in self.runs]
        for facts, ranks in ((found.facts, disk), (in_memory, machine)):
            for fact in facts:
                file = self._files.setdefault(_key_of(fact), _File(fact, ranks))
                place = found.places.get(fact.path)
                if place is not None:
                    file.places.update(dict.fromkeys(ranks, place))
        everyone = frozenset(range(self.world_size))
        for fact in found.in_archive:
            self._files[_key_of(fact)] = _File(fact, everyone)
            self._archived = True
        self.unread_archive = self.unread_archive or found.unread_archive
        self.generation = max(self.generation, found.generation)
        known = {(one.what, one.reason) for one in self.rejected}
        self.rejected += [one for one in found.rejected if (one.what, one.reason) not in known]
        self.anything |= found.anything
        self.other |= found.other
        self.odd += found.odd
        self.unforeseen |= found.unforeseen
        self.foreseen |= {(run, *newest) for run, newest in found.foreseen.items()}
        self.entries |= found.entries
        for entry in found.entries.values():
            if entry.info is not None:
                self._read.setdefault(entry.info.moment, []).append(entry)
        self.launched = max(self.launched, found.attempt)
        for run, attempt in found.attempts.items():
            if run in self.runs or run in found.known:
                self._attempts[run] = max(attempt, self._attempts.get(run, 0))

    def _leave_out_odd_steps(self) -> None:
        spoiled = without_odd_steps((key[3] for key in self._files), self.odd)
        self._files = {key: file for key, file in self._files.items() if key[3] not in spoiled}
        self.rejected += [Rejected(moment_name(m), str(step), m) for m, step in sorted(spoiled.items())]
        for path, entry in self.entries.items():
            if entry.info is not None and (step := spoiled.get(entry.info.moment)) is not None:
                self.entries[path] = entry._replace(problem=f"not used: {step}")

    def _leave_out_other_writers(self) -> None:
        """Of a step that two starts have written, with the same number of attempt and each without knowing of the
        other, keep the files of one: of more ranks, or those on disk."""
        groups: dict[Moment, dict[int, list[Key]]] = {}
        for key, file in self._files.items():
            groups.setdefault(file.fact.moment, {}).setdefault(file.fact.writers, []).append(key)
        for by_writers in groups.values():
            facts = {who: [self._files[key].fact for key in keys] for who, keys in by_writers.items()}
            if len(facts) == 1 or not any(fact.address for each in facts.values() for fact in each):
                continue

            def weight(who: int, of: Mapping[int, list[FileFact]] = facts) -> tuple[int, int, float, int]:
                on_disk = sum(not fact.address for fact in of[who])
                return len({fact.rank for fact in of[who]}), on_disk, max(fact.created for fact in of[who]), who

            kept = max(facts, key=weight)
            for who in by_writers.keys() - {kept}:
                for key in by_writers[who]:
                    del self._files[key]
                first = facts[who][0]
                why = f"another job than the one that wrote {facts[kept][0].path} has written the same step"
                self.rejected.append(Rejected(first.address or first.path, why))

    def _add_own(self, found: Findings, only: int | None) -> None:
        for rank, states in found.own.items():
            if only not in (None, rank):
                raise ValueError(f"rank {only} has found small states of rank {rank}")
            for moment, state in states.items():
                if self.may_use(moment, state):
                    self.own_states.setdefault(moment, set()).add(rank)
                    self._attempts[moment[0]] = max(moment[1], self._attempts[moment[0]])

    def may_use(self, moment: Moment, state: OwnState) -> bool:
        """Whether a rank's own small state of `moment` may be used: files of its run exist, and no forecast failed.

        The forecast of a process's first step has none before it that could have come true; that of another rank, of
        the same boundary, says as much.
        """
        if moment[0] not in self._attempts:
            return False
        return not state.forecast or (moment not in self.unforeseen and (state.trusted or moment in self.foreseen))

    # --- files ---

    @property
    def facts(self) -> list[FileFact]:
        """All usable files as of now; several files of a rank and step in the order in which to try them."""
        if self._facts is None:
            self._facts = [fact for file in sorted(self._files.values(), key=_order) if (fact := self._visible(file))]
        return self._facts

    def _visible(self, file: _File) -> FileFact | None:
        readers = file.seen_by
        if file.places and file.fact.rank < self.world_size:
            readers = readers | {file.fact.rank}
        if not readers:
            return None
        visible_to = None if len(readers) == self.world_size else readers
        return file.fact if file.fact.visible_to == visible_to else replace(file.fact, visible_to=visible_to)

    def seen_by(self, fact: FileFact) -> frozenset[int]:
        """The ranks that can read the file themselves, without fetching it."""
        return self._files[_key_of(fact)].seen_by

    def sources(self, rank: int, fact: FileFact) -> list[tuple[int, Place]]:
        """Where `rank` can fetch the file: (other rank, place)."""
        places = sorted(self._files[_key_of(fact)].places.items())
        return [(holder, place) for holder, place in places if holder != rank]

    def forget(self, rank: int | None, fact: FileFact, problem: str) -> None:
        """Remove a file that could not be used. `rank`: the rank that tried to read it; None: a process alone."""
        file = self._files[_key_of(fact)]
        if rank is None or rank in file.seen_by:  # all ranks that see this disk see the same bytes
            file.seen_by = frozenset()
        file.places = {}  # if it was fetched, it may be damaged on either side
        self.rejected.append(Rejected(fact.path, problem if rank is None else f"rank {rank}: {problem}"))
        self._facts = self._moments = None

    # --- planning ---

    def plan(
        self,
        world: World,
        faults: KnownFaults | None = None,
        *,
        step: int | None = None,
    ) -> ResumePlan | Refusal:
        """Plan a start. `step`: the one that may be taken, of any run and attempt, in the order in which a start tries
        them."""
        rejected, only = self.rejected, None
        if step is not None and not (only := [moment for moment in self.moments if moment[2] == step]):
            steps = listed(list(dict.fromkeys(moment[2] for moment in self.moments)), 8)
            why = f"no usable file is of it (steps that are there: {steps or 'none'})"
            rejected = [Rejected(f"step {step}", why), *rejected]
        plan = plan_resume(
            self.facts, world, faults=faults or KnownFaults(), own_states=self.own_states, rejected=rejected, only=only
        )
        return plan if isinstance(plan, Refusal) else replace(plan, steps_lost=self._steps_lost(plan))

    def _steps_lost(self, plan: ResumePlan) -> int | None:
        """Steps between the plan's and the newest one, counting damaged files and steps that were not asked for."""
        newest = max(key[3][2] for key in self._files if key[3][:2] == plan.moment[:2])
        return newest - plan.step if newest > plan.step else None

    @staticmethod
    def lines(rejected: Iterable[Rejected]) -> list[str]:
        """Lines for the log: what was not taken, and why; of an attempt's steps only the newest."""
        found: dict[str, None] = {}
        named: set[tuple[str, int]] = set()
        for each in rejected:
            if each.moment is None:
                has_name = os.path.basename(each.what) in each.reason
                found[each.reason if has_name else f"{each.what}: {each.reason}"] = None
            elif each.moment[:2] not in named:
                named.add(each.moment[:2])
                found[str(each)] = None
        return list(found)

    @property
    def is_all_known(self) -> bool:
        """Whether all files are sound files of some step: none is damaged or in quarantine."""
        return not (self.other or self.rejected)

    def was_never_complete(self, recorded: Mapping[str, RecordedSaves]) -> bool:
        """Whether it is proved that no step here was ever complete, so that a fresh start loses nothing: no step is
        whole, and every file that a rank of its run has ever saved is here.

        A kill in the very first save leaves one rank's file and not another's; a complete step of which a disk was lost
        looks the same.
        """
        there = {(fact.moment[0], fact.rank, fact.moment[2]) for fact in self.facts}
        for step in map(self.judge, self.moments):
            run = step.moment[0]
            record = recorded.get(run)
            if record is None or missing_ranks(step.world_size, record.begun) or step.is_usable:
                return False
            if not all((run, rank, number) in there for rank, number in record.saved):
                return False
        return self.is_all_known and bool(there)

    def next_attempt(self, run: str) -> int:
        """An attempt number above every attempt of the run that any rank has seen."""
        return max(self.launched, 1 + self._attempts.get(run, 0))

    # --- steps ---

    @property
    def moments(self) -> list[Moment]:
        """The moments that a start can try, in its order."""
        return order_of_moments(self.facts)

    @property
    def steps(self) -> list[SavedStep]:
        """Every step, the newest run, attempt and step first; also steps that are not for resuming."""
        useless = [entry.info for entry in self.entries.values() if entry.info is not None and not entry.info.resumable]
        return [self.judge(moment) for moment in order_of_moments([*self.facts, *useless])]

    def newest_complete(self, run_id: str | None = None) -> SavedStep | None:
        """The first complete step that a start can try, of any run or of `run_id`."""
        moments = (moment for moment in self.moments if run_id in (None, moment[0]))
        return next((step for moment in moments if (step := self.judge(moment)).is_complete), None)

    def judge(self, moment: Moment) -> SavedStep:
        """The step of `moment`, judged for a start of the same world size."""
        facts = self._by_moment().get(moment, [])
        entries = sorted(self._read.get(moment, ()), key=preference)
        infos = [entry.info for entry in entries if entry.info is not None]
        world_size = max((each.created, each.world_size) for each in (facts or infos))[1]
        return SavedStep(
            moment=moment,
            world_size=world_size,
            facts=tuple(facts),
            entries=tuple(entries),
            own_states=self.own_states.get(moment, ()),
        )

    def _by_moment(self) -> dict[Moment, list[FileFact]]:
        if self._moments is None:
            self._moments = {}
            for fact in settle_assumptions(self.facts):
                self._moments.setdefault(fact.moment, []).append(fact)
        return self._moments


def newest_complete(entries: Iterable[CatalogEntry], run_id: str) -> Moment | None:
    """As `Inventory.newest_complete` for one run, for retention, which runs during the training: it uses headers that
    were read before, and judges no more steps than needed.

    It ignores small states: a step in which a rank has no file is incomplete.
    """
    moments: dict[Moment, list[CatalogEntry]] = {}
    for entry in entries:
        if entry.info is not None and entry.info.resumable and entry.info.run_id == run_id:
            moments.setdefault(entry.info.moment, []).append(entry)
    for moment in sorted(moments, reverse=True):
        infos = [entry.info for entry in moments[moment] if entry.info is not None]
        if missing_ranks(max(info.world_size for info in infos), (info.rank for info in infos)):
            continue
        facts, _ = facts_of(moments[moment])
        if Inventory.merge([Findings(facts=facts)]).judge(moment).is_complete:
            return moment
    return None


def until_sound(
    inventory: Inventory, choose: Callable[[], T], check: Callable[[T], Iterable[tuple[int | None, FileFact, str]]]
) -> T:
    """Choose, check the chosen files, forget the damaged ones, and choose again until all chosen files are sound.

    check: reads the files of a choice and returns those that it could not read, as (rank, file, problem); see
    `Inventory.forget`. It may remember which files are sound. Ends because every round forgets a file or is the last.
    """
    while True:
        chosen = choose()
        damage = list(check(chosen))
        for rank, fact, problem in damage:
            inventory.forget(rank, fact, problem)
        if not damage:
            return chosen


def _order(file: _File) -> tuple[Any, ...]:
    """Sort key: a file that its rank can read itself goes before a copy that it would have to fetch."""
    fact = file.fact
    order = fact.held is not None, kind_place(fact.kind), -fact.created, fact.path
    return fact.moment, fact.rank, fact.rank not in file.seen_by, bool(fact.address), *order


def _groups(views: Sequence[str]) -> dict[str, frozenset[int]]:
    """The ranks that see the same files, by view."""
    groups: dict[str, list[int]] = {}
    for rank, view in enumerate(views):
        groups.setdefault(view, []).append(rank)
    return {view: frozenset(ranks) for view, ranks in groups.items()}
