"""A plan that was written down, read back: checked in full before anybody acts on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mindx_elastic.core.layout import MAX_RANKS
from mindx_elastic.errors import StrPath, UsageError
from mindx_elastic.plan.facts import Rejected
from mindx_elastic.platforms.plan_files import NOTHING, SCHEMA
from mindx_elastic.platforms.restore_ranks import RestoreRanks, groups_and_donors, parse_restore_ranks
from mindx_elastic.platforms.small_files import read_bounded

__all__ = ["SavedPlan", "SavedRank", "parse_plan", "read_plan"]


@dataclass(frozen=True)
class SavedRank:
    """What one new rank reads."""

    rank: int
    path: str
    """Relative to the checkpoint directory, or absolute."""
    donor: int | None
    assembled: bool
    nbytes: int


@dataclass(frozen=True)
class SavedPlan:
    """A plan or a refusal as it was written down. See `outputs.plan_to_json`."""

    restorable: bool
    run_id: str
    attempt: int
    step: int
    """-1 for a refusal."""
    old_world_size: int
    new_world_size: int
    resharded: bool
    inexact: tuple[str, ...]
    steps_lost: int | None
    faults: frozenset[int]
    ranks: tuple[SavedRank, ...]
    restore: RestoreRanks
    rejected: tuple[Rejected, ...]


def read_plan(path: StrPath) -> SavedPlan:
    """Read resume_plan.json, or resume_plan.pb (by its ending). Raises UsageError, with the path, for one that cannot
    be opened, is damaged or contradicts itself."""
    data = read_bounded(path, "resume plan")
    try:
        return parse_plan(_parse_pb(data) if Path(path).suffix == ".pb" else json.loads(data))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"resume plan {path}: {error}") from None


def parse_plan(document: Any) -> SavedPlan:
    """The plan in what `plan_to_json` gave. Raises UsageError for anything else."""
    try:
        return _parse_plan(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise error if isinstance(error, UsageError) else UsageError(f"malformed plan: {error!r:.200}") from None


def _parse_plan(document: Any) -> SavedPlan:
    if document["schema"] != SCHEMA:
        raise UsageError(f"schema {document['schema']!r:.40}; this version reads {SCHEMA}")
    restorable = _typed(document["restorable"], bool)
    rejected = tuple(Rejected(_typed(e["what"], str), _typed(e["reason"], str)) for e in document["rejected"])
    faults = frozenset(_number(rank) for rank in document["faults"])
    if not restorable:
        return SavedPlan(False, "", 0, -1, 0, 0, False, (), None, faults, (), RestoreRanks(), rejected)
    old, new = _number(document["old_world_size"]), _number(document["new_world_size"])
    ranks = tuple(_saved_rank(each, old) for each in document["ranks"])
    if [each.rank for each in ranks] != list(range(new)) or not new or not old or max(faults, default=0) >= old:
        raise UsageError("its ranks are not those of its worlds")
    restore = RestoreRanks(groups_and_donors(document["restore_ranks_map"], "restore_ranks_map"))
    donors = tuple(restore.donors.values())
    if parse_restore_ranks(document["restore_ranks"]) != donors or max(donors, default=0) >= old:
        raise UsageError("restore_ranks and restore_ranks_map contradict each other, or the world")
    inexact = tuple(_typed(text, str) for text in document["inexact"])
    if _typed(document["exact"], bool) is bool(inexact):
        raise UsageError("exact and inexact contradict each other")
    lost = document["steps_lost"]
    return SavedPlan(
        restorable=True,
        run_id=_typed(document["run_id"], str),
        attempt=_number(document["attempt"], 1 << 63),
        step=_number(document["step"], 1 << 63),
        old_world_size=old,
        new_world_size=new,
        resharded=_typed(document["resharded"], bool),
        inexact=inexact,
        steps_lost=None if lost is None else _number(lost, 1 << 63),
        faults=faults,
        ranks=ranks,
        restore=restore,
        rejected=rejected,
    )


def _saved_rank(content: Any, world_size: int) -> SavedRank:
    path = PurePosixPath(_typed(content["path"], str))
    if not path.name or ".." in path.parts or "\0" in str(path):
        raise UsageError(f"{content['path']!r:.80} is no path of a checkpoint file")
    donor = content["donor"]
    return SavedRank(
        rank=_number(content["rank"]),
        path=str(path),
        donor=None if donor is None else _number(donor, world_size),
        assembled=_typed(content["assembled"], bool),
        nbytes=_number(content["bytes"], 1 << 63),
    )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise UsageError(f"{value!r:.80} where a {kind.__name__} should be")
    return value


def _number(value: Any, end: int = MAX_RANKS) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise UsageError(f"{value!r:.80} where a number from 0 to {end - 1} should be")
    return value


def _parse_pb(data: bytes) -> dict[str, Any]:
    from google.protobuf.message import DecodeError

    from mindx_elastic.platforms import resume_plan_pb2

    pb2: Any = resume_plan_pb2
    message = pb2.ResumePlan()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise UsageError(f"no protobuf message: {error}") from None
    return _from_proto(message)


def _from_proto(message: Any) -> dict[str, Any]:
    """The way back from `outputs.plan_to_proto`."""

    def optional(part: Any, name: str) -> Any:
        return getattr(part, name) if part.HasField(name) else None

    def donors(groups: Any) -> list[dict[str, Any]]:
        return [{"ranks": list(group.rank), "donor": optional(group, "donor")} for group in groups]

    document: dict[str, Any] = {"schema": message.schema, "restorable": message.restorable, **NOTHING}
    if message.restorable:
        document |= {key: getattr(message, key) for key, value in NOTHING.items() if value is None or value == 0}
        for key in ("old_mesh", "new_mesh"):
            document[key] = {each.name: each.size for each in getattr(message, key)} or None
        document["steps_lost"] = optional(message, "steps_lost")
        document |= {"kinds": list(message.kind), "inexact": list(message.inexact)}
        document["replica_groups"] = donors(message.replica_group)
        document["ranks"] = [
            {
                "rank": each.rank,
                "path": each.path.decode("utf-8", "surrogatepass"),
                "donor": optional(each, "donor"),
                "assembled": each.assembled,
                "bytes": each.bytes,
            }
            for each in message.rank
        ]
    document |= {"faults": list(message.fault), "other_worlds": list(message.other_world)}
    document |= {"restore_ranks": message.restore_ranks, "found_anything": message.found_anything}
    document["restore_ranks_map"] = {",".join(map(str, g.rank)): g.donor for g in message.restore_ranks_map}
    document["rejected"] = [{"what": each.what, "reason": each.reason} for each in message.rejected]
    return document
