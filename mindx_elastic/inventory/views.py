"""What all ranks of a start can see, put together: every rank comes to the same facts, and so to the same plan.

Disks may be shared, or each node has its own, with the same path on each: a file is known by its path and the disk that
it lies on, and for each it is noted which ranks can read it. A copy of a rank's file on another node counts as
readable by that rank where a transport can fetch it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense
from mindx_elastic.core.moment import Moment, moment_name
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.inventory.facts import pack_facts, strategy_digest, unpack_facts
from mindx_elastic.inventory.findings import Place, Transport
from mindx_elastic.memory.memory_files import OwnState
from mindx_elastic.persist.catalog import KIND_ORDER
from mindx_elastic.plan.facts import FileFact, Rejected

__all__ = ["START_TIMEOUT_S", "Place", "Sight", "Sights", "Transport", "key_of", "share_sights"]

START_TIMEOUT_S = 1800.0  # verifying hundreds of GB on a slow disk takes minutes, on one rank longer than on another

Key = tuple[str, str, int, Moment, str, float, int]


@dataclass
class Sight:
    """What one rank has found."""

    attempt: int = 0
    """As the launcher counts."""
    group: tuple[int, ...] = ()
    """The ranks that have the same disks before them, this one included: what is in `facts` they all see."""
    facts: list[FileFact] = field(default_factory=list)
    """Of this rank's share of the files on these disks."""
    in_memory: list[FileFact] = field(default_factory=list)
    """What only ranks of this machine see, each for itself."""
    places: dict[Key, Place] = field(default_factory=dict)
    """Of files that may be fetched from here."""
    own: dict[Moment, OwnState] = field(default_factory=dict)
    """This rank's own small state of a step, to go with a donor's file."""
    unforeseen: set[Moment] = field(default_factory=set)
    """Boundaries that came out otherwise than their forecasts, as some rank's file says."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Highest attempt of each run."""
    rejected: list[Rejected] = field(default_factory=list)
    anything: bool = False
    """There are files of ours, or were."""
    other: bool = False
    """Some of them are no sound files of a step: nobody knows what they were."""

    def encode(self) -> str:
        return json.dumps(
            {
                "attempt": self.attempt,
                "group": self.group,
                "facts": pack_facts(self.facts),
                "in_memory": pack_facts(self.in_memory),
                "places": [self.places.get(key_of(fact)) for fact in self.facts],
                "own": [[*moment, state.forecast] for moment, state in self.own.items()],
                "unforeseen": sorted(self.unforeseen),
                "rejected": [[one.what, one.reason] for one in self.rejected],
                "anything": self.anything,
                "other": self.other,
                "attempts": self.attempts,
            }
        )


def key_of(fact: FileFact) -> Key:
    """What one file on one disk is known by."""
    return fact.where, fact.path, fact.rank, fact.moment, fact.kind, fact.created, fact.nbytes


class Sights:
    """What all ranks see; the same on every rank, and so is everything that is derived from it."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.own_states: dict[Moment, set[int]] = {}
        """For each step the ranks that have their own small state of it."""
        self.unforeseen: set[Moment] = set()
        self.rejected: list[Rejected] = []
        self.anything = self.other = False
        self.launched = 0
        self._facts: dict[Key, FileFact] = {}
        self._seen: dict[Key, set[int]] = {}
        self._places: dict[Key, dict[int, Place]] = {}
        self._attempts: dict[str, int] = {}
        self._damage: list[tuple[Moment, str]] = []

    def add(self, rank: int, content: Mapping[str, Any], strategies: Mapping[str, Strategy]) -> None:
        """What `rank` says that it has found."""
        group = [_rank(each, self.world_size) for each in content["group"]]
        for fact, place in zip(unpack_facts(content["facts"], strategies), content["places"], strict=True):
            self._note(fact, group)
            if place is not None:
                known = self._places.setdefault(key_of(fact), {})
                known.update(dict.fromkeys(group, (int(place[0]), str(place[1]))))
        for fact in unpack_facts(content["in_memory"], strategies):
            self._note(fact, [rank])
        known_lines = {(one.what, one.reason) for one in self.rejected}
        told = [(str(what), str(reason)) for what, reason in content["rejected"]]
        self.rejected += [Rejected(*row) for row in told if row not in known_lines]
        self.anything |= bool(content["anything"])
        self.other |= bool(content["other"])
        self.launched = max(self.launched, int(content["attempt"]))
        self.unforeseen |= {_moment(each) for each in content["unforeseen"]}
        for run, attempt in content["attempts"].items():
            self._attempts[run] = max(int(attempt), self._attempts.get(run, 0))

    def add_own(self, rank: int, content: Mapping[str, Any]) -> None:
        """The small states that `rank` has of its own; when everything else was added."""
        for *each, forecast in content["own"]:
            moment = _moment(each)
            if self.may_use(moment, forecast=bool(forecast)):
                self.own_states.setdefault(moment, set()).add(rank)
                self._attempts[moment[0]] = max(moment[1], self._attempts[moment[0]])

    def may_use(self, moment: Moment, *, forecast: bool) -> bool:
        """Whether a rank's own small state of `moment` is worth something: of a run that files know, and come true."""
        return moment[0] in self._attempts and not (forecast and moment in self.unforeseen)

    def _note(self, fact: FileFact, seen_by: Iterable[int]) -> None:
        key = key_of(fact)
        self._facts.setdefault(key, fact)
        self._seen.setdefault(key, set()).update(seen_by)

    def facts(self) -> list[FileFact]:
        """All usable files as of now, of a rank's several files of a step the one to try first in front."""
        found = []
        for key, fact in self._facts.items():
            readers = self._seen[key] | self._fetchers(key, fact)
            if readers:
                everybody = len(readers) == self.world_size
                found.append(replace(fact, visible_to=None if everybody else frozenset(readers)))
        # A file that its own rank has before itself goes before a copy that it would have to fetch.
        found.sort(
            key=lambda fact: (fact.moment, fact.rank, fact.rank not in self._seen[key_of(fact)], *_preference(fact))
        )
        return found

    def _fetchers(self, key: Key, fact: FileFact) -> set[int]:
        return {fact.rank} if self._places.get(key) and fact.rank < self.world_size else set()

    def sees(self, rank: int, fact: FileFact) -> bool:
        """Whether `rank` has the file before itself, and need not fetch it."""
        return rank in self._seen[key_of(fact)]

    def sources(self, rank: int, fact: FileFact) -> list[tuple[int, Place]]:
        """Where `rank` can fetch the file: (other rank, place)."""
        places = sorted(self._places.get(key_of(fact), {}).items())
        return [(holder, place) for holder, place in places if holder != rank]

    def forget(self, rank: int, fact: FileFact, problem: str) -> None:
        """`rank` was told to read a file and could not use it. Called on all ranks in the same order."""
        key = key_of(fact)
        if rank in self._seen[key]:  # all who have this disk before them see the same bytes
            self._seen[key].clear()
        self._places.pop(key, None)  # where it was fetched, nobody knows on which side it was spoilt
        self._damage.append((fact.moment, f"rank {rank}: {problem}"))

    @property
    def is_all_known(self) -> bool:
        """Whether all that is there are sound files of some step, none damaged or put aside."""
        return not (self.other or self.rejected or self._damage)

    def lines(self, taken: Moment | None, rejected: Iterable[Rejected]) -> list[str]:
        """For the log: everything that was not taken, and why; damage that was found on the way in its place."""
        damaged: dict[Moment, list[str]] = {}
        for moment, text in self._damage:
            damaged.setdefault(moment, []).append(text)
        found: list[str] = []
        named: set[tuple[str, int]] = set()
        for one in rejected:
            if one.moment is None:
                found.append(f"{one.what}: {one.reason}")
            elif one.moment not in damaged and one.moment[:2] not in named:  # of an attempt the newest is enough
                named.add(one.moment[:2])
                found.append(str(one))
        for moment, texts in damaged.items():
            unused = "" if moment == taken else " is not used"
            found.append(f"{moment_name(moment)}{unused}: {'; '.join(texts)}")
        return list(dict.fromkeys(found))

    def next_attempt(self, run: str) -> int:
        """Above every attempt of the run that any rank has seen."""
        return max(self.launched, 1 + self._attempts.get(run, 0))


def _preference(fact: FileFact) -> tuple[Any, ...]:
    kind = KIND_ORDER.index(fact.kind) if fact.kind in KIND_ORDER else len(KIND_ORDER)
    return kind, -fact.created, fact.path


def _rank(value: object, world_size: int) -> int:
    if type(value) is not int or not 0 <= value < world_size:
        raise ValueError(f"no rank of {world_size}")
    return value


def _moment(values: Sequence[Any]) -> Moment:
    run, attempt, step = values
    return str(run), int(attempt), int(step)


def share_sights(sight: Sight, rank: int, exchange: Exchange) -> Sights:
    """Main thread, all ranks together. A strategy that several ranks have met is sent by one of them."""
    mine = {
        strategy_digest(s): s for s in {id(f.strategy): f.strategy for f in (*sight.facts, *sight.in_memory)}.values()
    }
    texts = exchange.gather("strategies", json.dumps(list(mine)), START_TIMEOUT_S)
    with making_sense("the digests of what the ranks have found"):
        met = [[str(digest) for digest in json.loads(text)] for text in texts]
    first = {digest: number for number in reversed(range(len(met))) for digest in met[number]}
    sent = {digest: strategy.to_json() for digest, strategy in mine.items() if first[digest] == rank}
    body = json.dumps({"strategies": sent, "sight": sight.encode()})
    texts = exchange.gather("sight", body, START_TIMEOUT_S)
    with making_sense("what the ranks have found"):
        bodies = [json.loads(text) for text in texts]
        strategies = {key: Strategy.from_json(each) for body in bodies for key, each in body["strategies"].items()}
        contents = [json.loads(body["sight"]) for body in bodies]
        sights = Sights(len(contents))
        for number, content in enumerate(contents):
            sights.add(number, content, strategies)
        for number, content in enumerate(contents):
            sights.add_own(number, content)
    return sights
