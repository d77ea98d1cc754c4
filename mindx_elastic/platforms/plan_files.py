"""What a plan looks like outside of this process: ``resume_plan.json``, ``resume_plan.pb``, a shell file of exports.

All three say the same, and the same plan gives the same bytes. A refusal is written, too: a start script must never
find yesterday's plan. Paths are relative to the checkpoint directory where they lie under it, so that a directory that
is mounted elsewhere tomorrow keeps its plan. `saved_plan` reads them back.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import StrPath
from mindx_elastic.plan.facts import Refusal, ResumePlan
from mindx_elastic.platforms.restore_ranks import RestoreRanks, restore_ranks_of
from mindx_elastic.platforms.small_files import write_whole

__all__ = [
    "NOTHING",
    "PLAN_JSON",
    "PLAN_PB",
    "SCHEMA",
    "env_lines",
    "mesh_of",
    "plan_to_bytes",
    "plan_to_json",
    "plan_to_proto",
    "write_env_file",
    "write_plan",
]

PLAN_JSON, PLAN_PB = "resume_plan.json", "resume_plan.pb"
SCHEMA = 1
NOTHING: dict[str, Any] = {
    **dict.fromkeys(("run_id", "attempt", "step", "epoch", "step_in_epoch", "created"), None),
    **dict.fromkeys(
        ("old_world_size", "new_world_size", "old_mesh", "new_mesh", "resharded", "exact", "steps_lost"), None
    ),
    **{key: [] for key in ("kinds", "inexact", "ranks", "replica_groups")},
    "total_bytes": 0,
}
"""What a refusal has in place of a plan."""


def plan_to_json(plan: ResumePlan | Refusal, directory: StrPath | None = None) -> dict[str, Any]:
    """The document. All keys are always there; those without a meaning for a refusal are null, or empty.

    ==================================  ==============================================================================
    schema                              1
    restorable                          false: a refusal
    run_id, attempt, step               what is resumed from
    epoch, step_in_epoch                of that step
    created                             unix seconds, of the newest file that is read
    kinds                               of the files that are read, sorted: "breakpoint", "periodic", ...
    old_world_size, new_world_size      numbers of ranks
    old_mesh, new_mesh                  {"dp": 2, "tp": 2}; null: its dimensions have no names
    resharded                           the new ranks hold other parts than the old ones
    exact, inexact                      bit for bit as if nothing had happened; if not, the reasons
    steps_lost                          steps that were seen and have to be done again; null: nothing newer was seen
    faults                              old ranks that are known to be faulty
    total_bytes                         of tensors, that all ranks read together
    ranks                               [{rank, path, donor, assembled, bytes}] for each new rank, in order; donor null:
                                        its own file; assembled: its tensors come from several files, and `path` gives
                                        the rest
    replica_groups                      [{ranks, donor}] of the old world; donor: lowest healthy rank with a file, or
                                        null
    restore_ranks, restore_ranks_map    see `restore_ranks`; the map as an object
    found_anything                      there were usable files; a refusal without is no reason to worry, if `rejected`
                                        is empty, too
    other_worlds                        of a refusal: numbers of ranks with which a start would work
    rejected                            [{what, reason}] steps and files that are not used
    ==================================  ==============================================================================
    """

    def shown(path: str) -> str:
        return path if directory is None else _relative(path, directory)

    rejected = plan.reasons if isinstance(plan, Refusal) else plan.rejected
    document: dict[str, Any] = {"schema": SCHEMA, "restorable": isinstance(plan, ResumePlan), **deepcopy(NOTHING)}
    restore = RestoreRanks()
    if isinstance(plan, ResumePlan):
        groups = plan.source.replica_groups()
        restore = restore_ranks_of(plan, groups)
        document |= _plan_values(plan, shown)
        document["replica_groups"] = [{"ranks": list(group), "donor": _donor(plan, group)} for group in groups]
    document |= {
        "faults": sorted(plan.faults),
        "restore_ranks": restore.ranks_text,
        "restore_ranks_map": {",".join(map(str, group)): donor for group, donor in restore.donors.items()},
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
        "exact": plan.exact,
        "inexact": list(plan.inexact),
        "steps_lost": plan.steps_lost,
        "total_bytes": sum(each.nbytes for each in plan.ranks),
        "ranks": [
            {
                "rank": each.rank,
                "path": shown(each.file.path),
                "donor": each.donor,
                "assembled": each.assembled,
                "bytes": each.nbytes,
            }
            for each in plan.ranks
        ],
    }


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
    """`path` under `directory`; as it is where it lies elsewhere, or is no path."""
    prefix = os.path.join(os.fspath(directory), "")
    return path[len(prefix) :] if path.startswith(prefix) and len(path) > len(prefix) else path


# --- protobuf ---


def plan_to_proto(document: Mapping[str, Any]) -> Any:
    """The message ``ResumePlan`` of resume_plan.proto, from what `plan_to_json` gives."""
    from mindx_elastic.platforms import resume_plan_pb2

    pb2: Any = resume_plan_pb2
    message = pb2.ResumePlan()
    renamed = {"kinds": "kind", "faults": "fault", "other_worlds": "other_world"}
    lists = ("inexact", *renamed)
    for key in lists:
        getattr(message, renamed.get(key, key)).extend(map(_text, document[key]))
    for key in ("schema", "restorable", "restore_ranks", "found_anything", "total_bytes", *NOTHING):
        if document[key] is not None and not isinstance(document[key], (list, dict)):
            setattr(message, key, _text(document[key]))
    for key in ("old_mesh", "new_mesh"):
        for name, size in (document[key] or {}).items():
            getattr(message, key).add(name=_text(name), size=size)
    for each in document["ranks"]:
        message.rank.add(**{**each, "path": each["path"].encode("utf-8", "surrogatepass")})
    for each in document["replica_groups"]:
        message.replica_group.add(rank=each["ranks"], donor=each["donor"])
    for key, donor in document["restore_ranks_map"].items():
        message.restore_ranks_map.add(rank=map(int, key.split(",")), donor=donor)
    for each in document["rejected"]:
        message.rejected.add(what=_text(each["what"]), reason=_text(each["reason"]))
    return message


def plan_to_bytes(document: Mapping[str, Any]) -> bytes:
    """resume_plan.pb, from what `plan_to_json` gives."""
    data: bytes = plan_to_proto(document).SerializeToString(deterministic=True)
    return data


def _text(value: Any) -> Any:
    """Text that protobuf can hold: header fields and file names may have halves of characters."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


# --- files ---


def write_plan(directory: StrPath, plan: ResumePlan | Refusal) -> tuple[Path, Path]:
    """Write resume_plan.json and resume_plan.pb into `directory`, each in one step; returns their paths.

    Raises SaveError when they cannot be written.
    """
    document = plan_to_json(plan, directory)
    folder = Path(directory)
    write_whole(folder / PLAN_JSON, (json.dumps(document, indent=1) + "\n").encode())
    write_whole(folder / PLAN_PB, plan_to_bytes(document))
    return folder / PLAN_JSON, folder / PLAN_PB


def env_lines(plan: ResumePlan | Refusal) -> list[str]:
    """Lines of the shell file: ``RESTORE_RANKS``, ``RESTORE_RANKS_MAP``, and which step it is (empty: none)."""
    restore, values = RestoreRanks(), ("", "", "")
    if isinstance(plan, ResumePlan):
        restore = restore_ranks_of(plan)
        values = (plan.moment[0], str(plan.moment[1]), str(plan.step))
    names = ("MINDX_RESUME_RUN_ID", "MINDX_RESUME_ATTEMPT", "MINDX_RESUME_STEP")
    exports = [f"export {name}={shlex.quote(_one_line(value))}" for name, value in zip(names, values, strict=True)]
    return [*restore.export_lines(), *exports]


def write_env_file(path: StrPath, plan: ResumePlan | Refusal) -> None:
    """Write `env_lines` to `path` in one step. Raises SaveError when that fails."""
    write_whole(path, "".join(f"{line}\n" for line in env_lines(plan)).encode())


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
