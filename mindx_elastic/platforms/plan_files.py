"""A plan for other programs: ``resume_plan.json``, and exports for a start script's shell.

Both say the same, and the same plan gives the same bytes. A refusal is written, too: a start script must never
find yesterday's plan. Paths under the checkpoint directory are relative to it, so that a directory that is mounted
elsewhere tomorrow keeps its plan. This package writes these files and never reads them: each start makes a new plan.

``RESTORE_RANKS`` and ``RESTORE_RANKS_MAP`` are the variables that start scripts on ModelArts and MindCluster read: a
donor for each group of ranks that hold the same parts, or ``-1`` where the files that the job wrote when it died are
not enough and the script has to take the last periodic checkpoint. Such a script knows whole files only: every rank of
the group loads the donor's file as it is. So ``-1`` also stands for a plan that works, but that puts tensors together
from parts of several files, or that reads periodic files.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from mindx_elastic.core.printable import printable
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import StrPath
from mindx_elastic.platforms.small_files import write_whole
from mindx_elastic.start.facts import DYING_KINDS, RankPlan, Refusal, ResumePlan

__all__ = [
    "PLAN_JSON",
    "env_lines",
    "export_restore_ranks",
    "mesh_of",
    "plan_to_json",
    "restore_ranks",
    "write_env_file",
    "write_plan",
]

PLAN_JSON = "resume_plan.json"
_SCHEMA = 1
_MAX_VARIABLE = 131_000  # bytes; Linux takes no string of 128 KiB or more in an environment
_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("run_id", "attempt", "step", "epoch", "step_in_epoch", "created"), None),
    **dict.fromkeys(
        ("old_world_size", "new_world_size", "old_mesh", "new_mesh", "resharded", "exact", "steps_lost"), None
    ),
    **{key: [] for key in ("kinds", "inexact", "ranks", "replica_groups")},
    "total_bytes": 0,
}
"""What a refusal has in place of a plan."""


def plan_to_json(plan: ResumePlan | Refusal, directory: StrPath | None = None) -> dict[str, Any]:
    """The document: see ``docs/reference.md``. All keys are always there; those without a meaning for a refusal are
    null, or empty."""

    def shown(path: str) -> str:
        return path if directory is None else _relative(path, directory)

    rejected = plan.reasons if isinstance(plan, Refusal) else plan.rejected
    document: dict[str, Any] = {"schema": _SCHEMA, "restorable": isinstance(plan, ResumePlan), **deepcopy(_NOTHING)}
    donors: dict[tuple[int, ...], int] = {}
    if isinstance(plan, ResumePlan):
        groups = plan.source.replica_groups()
        donors = restore_ranks(plan)
        document |= _plan_values(plan, shown)
        document["replica_groups"] = [{"ranks": list(group), "donor": _donor(plan, group)} for group in groups]
    document |= {
        "faults": sorted(plan.faults),
        "restore_ranks": _ranks_text(donors),
        "restore_ranks_map": _donors_by_text(donors),
        "found_anything": isinstance(plan, ResumePlan) or plan.found_anything,
        "other_worlds": [] if isinstance(plan, ResumePlan) else list(plan.other_worlds),
        "rejected": [{"what": shown(each.what), "reason": each.reason} for each in rejected],
    }
    return document


def _plan_values(plan: ResumePlan, shown: Callable[[str], str]) -> dict[str, Any]:
    read = [each.file for each in plan.ranks]
    if any(each.assembled for each in plan.ranks):
        read += [facts[0] for facts in plan.files.values()]
    return {
        "run_id": plan.moment[0],
        "attempt": plan.moment[1],
        "step": plan.step,
        "epoch": plan.epoch,
        "step_in_epoch": plan.step_in_epoch,
        "created": max(fact.created for fact in read),
        "kinds": sorted({fact.kind for fact in read}),
        "old_world_size": plan.source.world_size,
        "new_world_size": plan.world.size,
        "old_mesh": mesh_of(plan.source),
        "new_mesh": None if plan.world.strategy is None else mesh_of(plan.world.strategy),
        "resharded": plan.resharded,
        "exact": None if plan.exact else False,
        "inexact": [*plan.inexact, *plan.unmanaged],
        "steps_lost": plan.steps_lost,
        "total_bytes": sum(map(plan.bytes_of, plan.ranks)),
        "ranks": [
            {
                "rank": each.rank,
                "path": shown(each.file.path),
                "donor": each.donor,
                "assembled": each.assembled,
                "bytes": plan.bytes_of(each),
                **_of_divided(each, shown),
            }
            for each in plan.ranks
        ],
    }


def _of_divided(each: RankPlan, shown: Callable[[str], str]) -> dict[str, Any]:
    """Further files, where replicas have divided their state."""
    return {"parts_from": [shown(fact.path) for fact in each.others]} if each.others else {}


def _donor(plan: ResumePlan, group: tuple[int, ...]) -> int | None:
    return min((rank for rank in group if rank in plan.files), key=lambda r: (r in plan.faults, r), default=None)


def mesh_of(strategy: Strategy) -> dict[str, int] | None:
    """Names and sizes of the mesh dimensions; None where they have no names, or where a name has two sizes."""
    found: dict[str, int] = {}
    for group in strategy.classes:
        layout = group.layout
        for name, size in zip(layout.mesh_dim_names, layout.mesh_shape, strict=False):
            if found.setdefault(name, size) != size:
                return None
    return found or None


def _relative(path: str, directory: StrPath) -> str:
    """`path` relative to `directory` where it is under it; anything else unchanged."""
    prefix = os.path.join(os.fspath(directory), "")
    return path[len(prefix) :] if path.startswith(prefix) and len(path) > len(prefix) else path


# --- files ---


def write_plan(directory: StrPath, plan: ResumePlan | Refusal) -> Path:
    """Write resume_plan.json into `directory`, in one step; returns its path. Raises SaveError when that fails."""
    text = json.dumps(plan_to_json(plan, directory), indent=1)
    return write_whole(Path(directory) / PLAN_JSON, f"{text}\n".encode())


def env_lines(plan: ResumePlan | Refusal) -> list[str]:
    """Lines of the shell file: ``RESTORE_RANKS``, ``RESTORE_RANKS_MAP``, and which step it is (empty: none)."""
    donors: dict[tuple[int, ...], int] = {}
    values = ("", "", "")
    if isinstance(plan, ResumePlan):
        donors = restore_ranks(plan)
        values = (plan.moment[0], str(plan.moment[1]), str(plan.step))
    names = ("MINDX_RESUME_RUN_ID", "MINDX_RESUME_ATTEMPT", "MINDX_RESUME_STEP")
    exports = [f"export {name}={shlex.quote(printable(value))}" for name, value in zip(names, values, strict=True)]
    return [*export_restore_ranks(donors), *exports]


def write_env_file(path: StrPath, plan: ResumePlan | Refusal) -> None:
    """Write `env_lines` to `path` in one step. Raises SaveError when that fails."""
    write_whole(path, "".join(f"{line}\n" for line in env_lines(plan)).encode())


# --- RESTORE_RANKS ---


def restore_ranks(plan: ResumePlan) -> dict[tuple[int, ...], int]:
    """Replica group -> the lowest healthy rank of it whose dying save can be loaded whole; empty: not possible.

    A faulty rank whose file the plan trusts (it is of an earlier attempt) is a donor where its group has no healthy
    one.
    """
    if not plan.resharded:
        candidates = {group: group for group in plan.source.replica_groups()}
    elif _is_replicated(plan.source) and plan.world.strategy is not None and _is_replicated(plan.world.strategy):
        candidates = {tuple(range(plan.world.size)): tuple(plan.files)}  # one file is enough for all
    else:
        return {}
    donors: dict[tuple[int, ...], int] = {}
    for readers, ranks in candidates.items():
        found = [(rank in plan.faults, rank) for rank in ranks if _has_dying_save(plan, rank, readers)]
        if not found:
            return {}
        donors[readers] = min(found)[1]
    return donors


def _is_replicated(strategy: Strategy) -> bool:
    """Whether every rank holds everything."""
    return len(strategy.replica_groups()) == 1 and not any(group.layout.splitting for group in strategy.classes)


def _has_dying_save(plan: ResumePlan, rank: int, readers: Sequence[int]) -> bool:
    """Whether all of `readers` can read a dying save of `rank`. Snapshots count: those that outlive a job are its last
    boundary, and the agent writes them out under a breakpoint's name."""
    return any(
        fact.kind in DYING_KINDS and (fact.visible_to is None or fact.visible_to.issuperset(readers))
        for fact in plan.files.get(rank, ())
    )


def _ranks_text(donors: Mapping[tuple[int, ...], int]) -> str:
    return ",".join(map(str, donors.values())) or "-1"


def _donors_by_text(donors: Mapping[tuple[int, ...], int]) -> dict[str, int]:
    return {",".join(map(str, group)): donor for group, donor in donors.items()}


def export_restore_ranks(donors: Mapping[tuple[int, ...], int]) -> list[str]:
    """Lines for a shell to read. A map that is too long for an environment is left empty, with a remark."""
    lines = [f"export RESTORE_RANKS={shlex.quote(_ranks_text(donors))}"]
    text = json.dumps(_donors_by_text(donors))
    if len(text) > _MAX_VARIABLE:
        lines.append(f"# {len(text)} characters are too many for a variable: take the map from {PLAN_JSON}")
        text = ""
    return [*lines, f"export RESTORE_RANKS_MAP={shlex.quote(text)}"]
