"""Encodes a plan for all ranks into one answer for each rank, and decodes it there.

Rank 0 plans (see `restore`). Each rank receives a few lines that are the same for all, its own share, and nothing of
the others', so that a start moves O(ranks) bytes. A rank that assembles its tensors from parts of many files reads the
rows of all files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.core.fields import read
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.start.facts import FileFact, RankPlan, ResumePlan, World
from mindx_elastic.start.findings import Place
from mindx_elastic.start.inventory import Inventory

__all__ = ["Share", "share_in", "tell_shares"]

_SOURCE, _FILES = "source", "files"
_COMMON = ("moment", "epoch", "step_in_epoch", "resharded", "inexact", "unmanaged", "steps_lost")
"""What a plan says to all ranks alike."""


class Share(NamedTuple):
    """What one rank reads."""

    plan: ResumePlan
    """What this rank needs of it: `ranks` is empty, and `files` has its own file, or where it is assembled all."""
    rank: RankPlan
    is_seen: bool
    """The rank can read the file itself; else it fetches it from one of `sources`."""
    sources: Sequence[tuple[int, Place]]
    uses_own_state: bool
    """Whether this rank uses its own small state of the step (see `Inventory.may_use`)."""


# --- rank 0 ---


def tell_shares(plan: ResumePlan, inventory: Inventory) -> Merged:
    """Encode rank 0's answer."""
    has_own = inventory.own_states.get(plan.moment, set())
    own = []
    for share in plan.ranks:
        is_seen = share.rank in inventory.seen_by(share.file)
        sources = [] if is_seen else inventory.sources(share.rank, share.file)
        own.append(
            {
                "file": _row(share.file),
                "assembled": share.assembled,
                "seen": is_seen,
                "sources": [[holder, list(place)] for holder, place in sources],
                "own_state": share.rank in has_own,
                "others": list(map(_row, share.others)),
            }
        )
    common = {name: getattr(plan, name) for name in _COMMON}
    common |= {"old_size": plan.source.world_size, "size": plan.world.size}
    more: dict[str, Any] = {}
    if any(share.assembled for share in plan.ranks):
        rows = [_row(fact) for facts in plan.files.values() for fact in facts]
        more = {_FILES: rows, _SOURCE: plan.source.to_json()}
    return Merged(common, own, more)


def _row(fact: FileFact) -> list[Any]:
    """What a rank has to know of a file that it reads."""
    visible = None if fact.visible_to is None else sorted(fact.visible_to)
    return [fact.rank, fact.path, visible, None if fact.held is None else asdict(fact.held)]


# --- every rank ---


def share_in(answer: Answer, rank: int, target: Strategy) -> Share:
    """Decode `rank`'s share. `target`: the layouts of its own tensors. Raises ValueError, KeyError or TypeError."""
    common, own = answer.common, answer.own
    old_size = int(common["old_size"])
    assembled = bool(own["assembled"])
    source, rows = Strategy(old_size, ()), [own["file"]]
    if assembled:
        rows, content = answer.more([_FILES, _SOURCE])
        source = Strategy.from_json(content)

    def fact_of(row: Sequence[Any]) -> FileFact:
        old, path, visible, held = row
        content = {"rank": old, "path": path, "moment": common["moment"], "world_size": old_size, "held": held}
        readers = None if visible is None else frozenset(map(int, visible))
        found = read(FileFact, content, strategy=source, visible_to=readers)
        if found.rank >= old_size:
            raise ValueError("not a file of a rank")
        return found

    files: dict[int, list[FileFact]] = {}
    for fact in map(fact_of, rows):
        files.setdefault(fact.rank, []).append(fact)
    others = tuple(map(fact_of, own["others"]))
    plan = read(
        ResumePlan,
        {name: common[name] for name in _COMMON},
        source=source,
        world=World(int(common["size"]), target),
        ranks=(),
        files={old: tuple(facts) for old, facts in files.items()},
    )
    return Share(
        plan,
        RankPlan(rank, fact_of(own["file"]), assembled, others),
        bool(own["seen"]),
        [(int(holder), (int(root), str(name))) for holder, (root, name) in own["sources"]],
        bool(own["own_state"]),
    )
