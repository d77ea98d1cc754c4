"""Encodes a plan for all ranks into one answer for each rank, and decodes it there.

Rank 0 plans (see `restore`). Each rank receives a few lines that are the same for all, its own share, and nothing of
the others', so that a start moves O(ranks) bytes. A rank that assembles its tensors from parts of many files reads the
rows of all files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.core.fields import plain, read
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.start.facts import FileFact, RankPlan, ResumePlan, World
from mindx_elastic.start.findings import Place
from mindx_elastic.start.inventory import Inventory

__all__ = ["Share", "share_in", "tell_shares"]

_SOURCE, _FILES = "source", "files"
_OF_ALL = ("moment", "epoch", "step_in_epoch", "resharded", "inexact", "unmanaged")
"""What every rank is told of a plan."""
_OF_A_FILE = ("path", "rank", "moment", "world_size", "visible_to", "held")
"""What a rank has to know of a file that it reads."""


@dataclass(frozen=True)
class Share:
    """What one rank reads."""

    plan: ResumePlan
    """What this rank needs of it: `ranks` is empty, and `files` has its own file, or where it is assembled all."""
    rank: RankPlan
    is_seen: bool
    """The rank can read the file itself; else it fetches it from one of `sources`."""
    sources: list[tuple[int, Place]]
    verify: list[FileFact]
    """The files whose digests this rank checks for all ranks: the ranks share that work."""
    uses_own_state: bool
    """Whether this rank uses its own small state of the step (see `Inventory.may_use`)."""


# --- rank 0 ---


def tell_shares(plan: ResumePlan, inventory: Inventory, verified: set[tuple[str, str]]) -> Merged:
    """Encode rank 0's answer. `verified`: paths that need no further check; the ones to check now are added to it."""
    is_assembled = any(share.assembled for share in plan.ranks)
    verify = _verifiers(plan, inventory, verified) if is_assembled else {}
    has_own = inventory.own_states.get(plan.moment, set())
    own = []
    for share in plan.ranks:
        is_seen = share.rank in inventory.seen_by(share.file)
        own.append(
            {
                "file": _told(share.file),
                "assembled": share.assembled,
                "others": list(map(_told, share.others)),
                "small_from": None if share.small_from is None else _told(share.small_from),
                "is_seen": is_seen,
                "sources": [] if is_seen else plain(inventory.sources(share.rank, share.file)),
                "verify": list(map(_told, verify.get(share.rank, ()))),
                "uses_own_state": share.rank in has_own,
            }
        )
    common = {name: plain(getattr(plan, name)) for name in _OF_ALL}
    more: dict[str, Any] = {}
    if is_assembled:
        rows = [_told(fact) for facts in plan.files.values() for fact in facts]
        more = {_FILES: rows, _SOURCE: plan.source.to_json()}
    return Merged({**common, "old_size": plan.source.world_size, "size": plan.world.size}, own, more)


def _verifiers(plan: ResumePlan, inventory: Inventory, verified: set[tuple[str, str]]) -> dict[int, list[FileFact]]:
    """The files that each rank checks: the used files, divided among the ranks that see them."""
    found: dict[int, list[FileFact]] = {}
    turns: dict[frozenset[int], tuple[list[int], int]] = {}
    used = plan.used_paths()
    for fact in (fact for facts in plan.files.values() for fact in facts):
        if fact.path not in used or (fact.where, fact.path) in verified:
            continue
        seen_by = inventory.seen_by(fact)
        readers, turn = turns.get(seen_by) or (sorted(seen_by), 0)
        turns[seen_by] = readers, turn + 1
        if readers:
            found.setdefault(readers[turn % len(readers)], []).append(fact)
            verified.add((fact.where, fact.path))  # nodes may have other bytes under the same path
    return found


def _told(fact: FileFact) -> dict[str, Any]:
    return {name: plain(getattr(fact, name)) for name in _OF_A_FILE}


# --- every rank ---


def share_in(answer: Answer, rank: int, target: Strategy | None) -> Share:
    """Decode `rank`'s share. `target`: the layouts of its own tensors. Raises ValueError, KeyError or TypeError."""
    common, own = answer.common, answer.own
    source, rows = Strategy(common["old_size"], ()), [own["file"]]
    if own["assembled"]:
        rows, content = answer.more([_FILES, _SOURCE])
        source = Strategy.from_json(content)
    moment = tuple(common["moment"])

    def fact_of(row: Any) -> FileFact:
        fact = read(FileFact, row, strategy=source)
        if (fact.moment, fact.world_size) != (moment, source.world_size):
            raise ValueError("it is no file of this step")
        return fact

    files: dict[int, tuple[FileFact, ...]] = {}
    for fact in map(fact_of, rows):
        files[fact.rank] = (*files.get(fact.rank, ()), fact)
    world = World(common["size"], target)
    small = None if own["small_from"] is None else fact_of(own["small_from"])
    others = tuple(map(fact_of, own["others"]))
    share = read(RankPlan, own, rank=rank, file=fact_of(own["file"]), others=others, small_from=small)
    plan = read(ResumePlan, common, source=source, world=world, ranks=(), files=files)
    return read(Share, own, plan=plan, rank=share, verify=list(map(fact_of, own["verify"])))
