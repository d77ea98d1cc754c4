"""Reads resume_plan.pb as another program would: the document that resume_plan.json holds, from the schema alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["read_plan_pb"]

OF_A_PLAN = ("run_id", "attempt", "step", "epoch", "step_in_epoch", "created")
OF_ITS_WORLDS = ("old_world_size", "new_world_size", "resharded", "exact")


def read_plan_pb(path: Path) -> dict[str, Any]:
    message: Any = importlib.import_module("mindx_elastic.platforms.resume_plan_pb2").ResumePlan()
    message.ParseFromString(path.read_bytes())
    names = (*OF_A_PLAN, *OF_ITS_WORLDS)
    document: dict[str, Any] = {
        **{key: getattr(message, key) for key in ("schema", "restorable", "total_bytes", "found_anything")},
        **{key: getattr(message, key) if message.restorable else None for key in names},
        "steps_lost": optional(message, "steps_lost"),
        "restore_ranks": message.restore_ranks,
        "restore_ranks_map": {",".join(map(str, each.rank)): each.donor for each in message.restore_ranks_map},
        "replica_groups": [{"ranks": [*e.rank], "donor": optional(e, "donor")} for e in message.replica_group],
        "rejected": [{"what": each.what, "reason": each.reason} for each in message.rejected],
        "ranks": [
            {
                "rank": each.rank,
                "path": each.path.decode("utf-8", "surrogatepass"),
                "donor": optional(each, "donor"),
                "assembled": each.assembled,
                "bytes": each.bytes,
            }
            for each in message.rank
        ],
    }
    for key in ("old_mesh", "new_mesh"):
        document[key] = {each.name: each.size for each in getattr(message, key)} or None
    lists = {"kinds": "kind", "inexact": "inexact", "faults": "fault", "other_worlds": "other_world"}
    return document | {key: list(getattr(message, name)) for key, name in lists.items()}


def optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None
