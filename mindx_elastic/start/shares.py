"""Encodes a plan for all ranks into one answer for each rank, and decodes it there.

Rank 0 plans (see `restore`). Each rank receives a few lines that are the same for all, its own share, and nothing of
the others', so that a start moves O(ranks) bytes. A rank that assembles its tensors from parts of many files reads the
rows of all files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.core.layout import MAX_RANKS
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.start.facts import FileFact, RankPlan, ResumePlan, World
from mindx_elastic.start.findings import Place, decode_parts, encode_parts
from mindx_elastic.start.inventory import Inventory

__all__ = ["Share", "share_in", "tell_shares"]

_SOURCE, _FILES = "source", "files"


@dataclass(frozen=True)
class Share:
    """What one rank reads."""

    plan: ResumePlan
    """What this rank needs of it: `ranks` is empty, and `files` has its own file, or where it is assembled all."""
    rank: RankPlan
    number: int
    """The index of this rank's file among the files of its old rank."""
    is_seen: bool
    """The rank can read the file itself; else it fetches it from one of `sources`."""
    sources: Sequence[tuple[int, Place]]
    verify: Sequence[tuple[FileFact, int]]
    """The files whose digests this rank checks for all ranks, and their indexes: the ranks share that work."""
    others: Sequence[tuple[FileFact, int]]
    """The files with what this rank's file lacks of a divided state, and their indexes."""
    small_from: tuple[FileFact, int] | None
    """The file that has this rank's own small state, and its index; None: its own file, or memory."""
    uses_own_state: bool
    """Whether this rank uses its own small state of the step (see `Inventory.may_use`)."""


# --- rank 0 ---


def tell_shares(plan: ResumePlan, inventory: Inventory, verified: set[tuple[str, str]]) -> Merged:
    """Encode rank 0's answer. `verified`: paths that need no further check; the ones to check now are added to it."""
    world_size = plan.world.size
    verify = _verifiers(plan, inventory, verified) if any(share.assembled for share in plan.ranks) else {}
    has_own = inventory.own_states.get(plan.moment, set())
    own = []
    for share in plan.ranks:
        fact = share.file
        is_seen = share.rank in inventory.seen_by(fact)
        own.append(
            {
                "old": fact.rank,
                "number": plan.files[fact.rank].index(fact),
                "row": _row(fact),
                "assembled": share.assembled,
                "seen": is_seen,
                "sources": []
                if is_seen
                else [[holder, list(place)] for holder, place in inventory.sources(share.rank, fact)],
                "verify": [[each.rank, number, _row(each)] for each, number in verify.get(share.rank, ())],
                "own_state": share.rank in has_own,
                "others": [_place_in(plan, each) for each in share.others],
                "small": None if share.small_from is None else _place_in(plan, share.small_from),
            }
        )
    common = {
        "moment": list(plan.moment),
        "epoch": plan.epoch,
        "step_in_epoch": plan.step_in_epoch,
        "old_size": plan.source.world_size,
        "size": world_size,
        "resharded": plan.resharded,
        "inexact": list(plan.inexact),
        "unmanaged": list(plan.unmanaged),
        "steps_lost": plan.steps_lost,
    }
    more: dict[str, Any] = {}
    if any(share.assembled for share in plan.ranks):
        rows = [[old, [_row(fact) for fact in facts]] for old, facts in plan.files.items()]
        more = {_FILES: rows, _SOURCE: plan.source.to_json()}
    return Merged(common, own, more)


def _verifiers(
    plan: ResumePlan, inventory: Inventory, verified: set[tuple[str, str]]
) -> dict[int, list[tuple[FileFact, int]]]:
    """The files that each rank checks: the used files, divided among the ranks that see them."""
    found: dict[int, list[tuple[FileFact, int]]] = {}
    turns: dict[frozenset[int], tuple[list[int], int]] = {}
    used = plan.used_paths()
    for facts in plan.files.values():
        for number, fact in enumerate(facts):
            if fact.path not in used or (fact.where, fact.path) in verified:
                continue
            seen_by = inventory.seen_by(fact)
            readers, turn = turns.get(seen_by) or (sorted(seen_by), 0)
            turns[seen_by] = readers, turn + 1
            if readers:
                found.setdefault(readers[turn % len(readers)], []).append((fact, number))
                verified.add((fact.where, fact.path))  # nodes may have other bytes under the same path
    return found


def _place_in(plan: ResumePlan, fact: FileFact) -> list[Any]:
    return [fact.rank, plan.files[fact.rank].index(fact), _row(fact)]


def _row(fact: FileFact) -> list[Any]:
    visible = None if fact.visible_to is None else _runs(sorted(fact.visible_to))
    held = encode_parts(fact.held)
    return [fact.path, fact.kind, fact.created, fact.nbytes, fact.epoch, fact.step_in_epoch, visible, held]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as runs [first, count]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


# --- every rank ---


def share_in(answer: Answer, rank: int, target: Strategy | None) -> Share:
    """Decode `rank`'s share. `target`: the layouts of its own tensors. Raises ValueError, KeyError or TypeError."""
    common, own = answer.common, answer.own
    run, attempt, step = common["moment"]
    moment = (str(run), int(attempt), int(step))
    old_size = int(common["old_size"])
    assembled = bool(own["assembled"])
    source, rows = Strategy(old_size, ()), []
    if assembled:
        rows, content = answer.more([_FILES, _SOURCE])
        source = Strategy.from_json(content)

    def fact_of(old: int, row: Sequence[Any]) -> FileFact:
        path, kind, created, nbytes, epoch, step_in_epoch, visible, held = row
        if not isinstance(path, str) or not isinstance(kind, str) or type(old) is not int or not 0 <= old < old_size:
            raise ValueError("not a file of a rank")
        return FileFact(
            path=path,
            rank=old,
            moment=moment,
            world_size=old_size,
            strategy=source,
            kind=kind,
            created=float(created),
            nbytes=int(nbytes),
            epoch=int(epoch),
            step_in_epoch=int(step_in_epoch),
            visible_to=None if visible is None else frozenset(_expand(visible)),
            held=decode_parts(held),
        )

    def placed(content: Sequence[Any]) -> tuple[FileFact, int]:
        old, number, row = content
        return fact_of(old, row), int(number)

    others = [placed(each) for each in own["others"]]
    file = fact_of(own["old"], own["row"])
    files: Mapping[int, tuple[FileFact, ...]] = {file.rank: (file,)}
    if assembled:
        files = {old: tuple(fact_of(old, row) for row in facts) for old, facts in rows}
    plan = ResumePlan(
        moment=moment,
        epoch=int(common["epoch"]),
        step_in_epoch=int(common["step_in_epoch"]),
        source=source,
        world=World(int(common["size"]), target),
        ranks=(),
        files=files,
        resharded=bool(common["resharded"]),
        inexact=tuple(map(str, common["inexact"])),
        unmanaged=tuple(map(str, common["unmanaged"])),
        steps_lost=None if common["steps_lost"] is None else int(common["steps_lost"]),
    )
    return Share(
        plan,
        RankPlan(rank, file, assembled, tuple(fact for fact, _ in others)),
        int(own["number"]),
        bool(own["seen"]),
        [(int(holder), (int(root), str(name))) for holder, (root, name) in own["sources"]],
        [placed(each) for each in own["verify"]],
        others,
        None if own["small"] is None else placed(own["small"]),
        bool(own["own_state"]),
    )


def _expand(runs: Sequence[Sequence[int]]) -> list[int]:
    found: list[int] = []
    for first, count in runs:
        if type(first) is not int or type(count) is not int or not 0 <= first <= first + count <= MAX_RANKS:
            raise ValueError("not a list of ranks")
        found += range(first, first + count)
    return found
