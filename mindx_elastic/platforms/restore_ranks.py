"""``RESTORE_RANKS`` and ``RESTORE_RANKS_MAP``: which rank's dying save each replica group is restored from. Pure.

Start scripts of training platforms read these two variables: a donor for each group of ranks that hold the same parts,
the lowest healthy one, or ``-1``: there is no restoring from the files that the job wrote when it died, take the last
periodic checkpoint. Such a script knows whole files only: the donor's file is loaded as it is by every rank of the
group. So ``-1`` also stands for a plan that works, but that puts tensors together from parts of several files, or
that reads periodic files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mindx_elastic.core.layout import MAX_RANKS
from mindx_elastic.errors import UsageError
from mindx_elastic.plan.facts import DYING_KINDS, ResumePlan

__all__ = [
    "BREAKPOINT_KINDS",
    "IMPOSSIBLE",
    "RestoreRanks",
    "groups_and_donors",
    "parse_restore_ranks",
    "parse_restore_ranks_map",
    "restore_ranks",
    "restore_ranks_of",
]

IMPOSSIBLE = "-1"
BREAKPOINT_KINDS = DYING_KINDS
"""Kinds of files that count as a dying save. Snapshots do: those that outlive a job are its last boundary, written out
by the agent under a breakpoint's name."""

_MAX_TEXT = 16 << 20
_MAX_VARIABLE = 131_000  # bytes; Linux takes no string of 128 KiB or more in an environment
_RANKS = re.compile(r"[0-9]{1,8}(,[0-9]{1,8})*")


@dataclass(frozen=True)
class RestoreRanks:
    """The answer, in both forms."""

    donors: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """Replica group -> donor; empty: impossible."""

    @property
    def possible(self) -> bool:
        return bool(self.donors)

    @property
    def ranks_text(self) -> str:
        """``0,1``: a donor for each group, in the groups' order; ``-1``: impossible."""
        return ",".join(map(str, self.donors.values())) or IMPOSSIBLE

    @property
    def map_text(self) -> str:
        """``{"0,4": 0, "1,5": 1}``; ``{}``: impossible."""
        return json.dumps({",".join(map(str, group)): donor for group, donor in self.donors.items()})

    def export_lines(self) -> list[str]:
        """Lines for a shell to read. A map that is too long for an environment is left empty, with a remark."""
        lines = [f"export RESTORE_RANKS={shlex.quote(self.ranks_text)}"]
        text = self.map_text
        if len(text) > _MAX_VARIABLE:
            lines.append(f"# {len(text)} characters are too many for a variable: take the map from resume_plan.json")
            text = ""
        return [*lines, f"export RESTORE_RANKS_MAP={shlex.quote(text)}"]


def restore_ranks(
    groups: Sequence[Sequence[int]], available: Collection[int], faults: Collection[int] = ()
) -> RestoreRanks:
    """The lowest healthy rank of each group that has a file.

    groups: ranks that hold the same parts. available: ranks whose dying save can be used. faults: ranks that are not
    healthy. Impossible, when a group has no donor. Raises UsageError for a rank in two groups.
    """
    there, ill = frozenset(available), frozenset(faults)
    ordered = sorted(tuple(sorted(group)) for group in groups)
    ranks = [rank for group in ordered for rank in group]
    if len(set(ranks)) != len(ranks) or not all(ordered) or (ranks and min(ranks) < 0):
        raise UsageError("replica groups must have ranks from 0, and no rank may be in two of them")
    donors: dict[tuple[int, ...], int] = {}
    for group in ordered:
        donor = next((rank for rank in group if rank in there and rank not in ill), None)
        if donor is None:
            return RestoreRanks()
        donors[group] = donor
    return RestoreRanks(donors)


def restore_ranks_of(plan: ResumePlan, groups: Sequence[Sequence[int]] | None = None) -> RestoreRanks:
    """What a start script is to be told of `plan`.

    groups: ``plan.source.replica_groups()``, where the caller has them. A faulty rank whose file the plan trusts (it
    is of an earlier attempt) is a donor where its group has no healthy one.
    """
    if plan.resharded:
        return _of_moved_replicas(plan)
    groups = plan.source.replica_groups() if groups is None else groups
    available = {rank for group in groups for rank in group if _has_dying_save(plan, rank, group)}
    ill: set[int] = set()
    for group in groups:
        if any(rank in available and rank not in plan.faults for rank in group):
            ill |= plan.faults.intersection(group)
    return restore_ranks(groups, available, ill)


def _of_moved_replicas(plan: ResumePlan) -> RestoreRanks:
    """Other ranks than before, that all hold everything: one file is enough for all. Else whole files do not fit."""
    target = plan.world.strategy
    if target is None or any(group.layout.splitting for each in (plan.source, target) for group in each.classes):
        return RestoreRanks()
    if len(plan.source.replica_groups()) != 1 or len(target.replica_groups()) != 1:
        return RestoreRanks()
    ranks = range(plan.world.size)
    found = sorted((rank in plan.faults, rank) for rank in plan.files if _has_dying_save(plan, rank, ranks))
    return RestoreRanks({tuple(ranks): found[0][1]} if found else {})


def _has_dying_save(plan: ResumePlan, rank: int, readers: Sequence[int]) -> bool:
    """Whether a dying save of `rank` can be read by all of `readers`."""
    return any(
        fact.kind in BREAKPOINT_KINDS and (fact.visible_to is None or fact.visible_to.issuperset(readers))
        for fact in plan.files.get(rank, ())
    )


def parse_restore_ranks(text: str) -> tuple[int, ...]:
    """The donors in ``RESTORE_RANKS``; empty for ``-1``. Raises UsageError for anything else."""
    text = text.strip()
    return () if text == IMPOSSIBLE else _ranks(text, "RESTORE_RANKS")


def parse_restore_ranks_map(text: str) -> dict[tuple[int, ...], int]:
    """The groups and donors in ``RESTORE_RANKS_MAP``. Raises UsageError for anything else."""
    if len(text) > _MAX_TEXT:
        raise UsageError(f"RESTORE_RANKS_MAP has {len(text)} characters, {_MAX_TEXT} at most")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"RESTORE_RANKS_MAP is no JSON: {error}") from None
    return groups_and_donors(content, "RESTORE_RANKS_MAP")


def groups_and_donors(content: object, what: str) -> dict[tuple[int, ...], int]:
    """``{"0,4": 0}`` -> ``{(0, 4): 0}``. Raises UsageError for anything else, and for a rank in two groups."""
    if not isinstance(content, dict):
        raise UsageError(f"{what}: {content!r:.80} where an object of groups and donors should be")
    found: dict[tuple[int, ...], int] = {}
    seen: set[int] = set()
    for key, donor in content.items():
        group = _ranks(key, what)
        if type(donor) is not int or not 0 <= donor < MAX_RANKS:
            raise UsageError(f"{what}: {donor!r:.80} where the donor of ranks {key:.80} should be")
        if seen.intersection(group):
            raise UsageError(f"{what}: rank {min(seen.intersection(group))} is in two groups")
        seen.update(group)
        found[group] = donor
    return found


def _ranks(text: object, what: str) -> tuple[int, ...]:
    if not isinstance(text, str) or len(text) > _MAX_TEXT or not _RANKS.fullmatch(text):
        raise UsageError(f"{what}: {text!r:.80} where ranks like 0,4 should be")
    ranks = tuple(map(int, text.split(",")))
    if len(set(ranks)) != len(ranks) or max(ranks) >= MAX_RANKS:
        raise UsageError(f"{what}: {text:.80} names a rank twice, or one beyond {MAX_RANKS - 1}")
    return ranks
