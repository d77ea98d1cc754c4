"""Faults that a platform reports: what each form says, and all of them read once for a plan.

The keys tell the forms apart, never a file's name:

* ``fault-npus`` of the ConfigMap ``fault-config-<job>``: ``{"FaultRankIds": ["1"], "CreatTime": ...}``,
  ``{"FaultRank": [1], "UpdateTime": ...}``, ``{"status": "initializing"}``
* ``reset.json`` of ``reset-config-<job>``: ranks that are unrecovered or whose recovery has failed, ``GracefulExit``,
  ``FaultFlushing``

Each as a mounted ConfigMap, or as the JSON text under its key. Source: MindCluster's (formerly MindX DL) manual,
chapters on resumable training, and the sources of its components Volcano, NodeD and ClusterD.

One parser serves two callers. What it does not understand is left out and listed in `Faults.problems`. `fault_watch`
logs the problems and goes on: a better file may come. `read_faults` raises on them: a plan made from half a report
could be wrong.
"""

from __future__ import annotations

import json
import math
import os
import re
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic.config import FaultPaths
from mindx_elastic.core.posix import is_missing
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.small_files import named_errors, parse_json_object, read_text

__all__ = [
    "FAULT_KEY",
    "RESET_KEY",
    "Faults",
    "default_fault_sources",
    "merge",
    "parse_key",
    "parse_rank_list",
    "parse_text",
    "read_faults",
]

FAULT_KEY, RESET_KEY = "fault-npus", "reset.json"
"""Keys of a ConfigMap that tell of faults."""
_KEYS = (FAULT_KEY, RESET_KEY)
_RANK_KEYS, _TIME_KEYS = ("FaultRankIds", "FaultRank"), ("CreatTime", "CreateTime", "UpdateTime")
_RESET_KEYS = ("RankList", "FaultFlushing", "GracefulExit", "RetryTime", "RestartFaultProcess")
_HARMLESS_POLICIES = ("", "empty", "ignore")
_RANKS = re.compile(r" *([0-9]{1,9})(?: *- *([0-9]{1,9}))? *")
_MAX_LISTED = 1 << 20
_MAX_RANK = 1 << 24
_MILLISECONDS_FROM = 1e11  # in seconds that would be the year 5138
_MAX_PROBLEMS = 8  # in a line for a person


class Faults(NamedTuple):
    """What a platform says of faulty ranks."""

    ranks: frozenset[int] = frozenset()
    """The ranks that a plan may not rely on."""
    created: float | None = None
    """The youngest time stamp in the reports, unix seconds."""
    initializing: bool = False
    """The platform has not finished: it knows nothing yet, or still clears devices (``"FaultFlushing": true``)."""
    source: str = ""
    """Where this was read; empty: nowhere."""
    problems: tuple[str, ...] = ()
    """Parts of a report that were not understood and were left out, for a person, after the report's name."""
    unrecovered: frozenset[int] = frozenset()
    """The `ranks` for which a running job has to stop; the others are ranks whose recovery has failed."""
    exit_requested: bool = False
    """``"GracefulExit": 1``: the job is to save and leave."""


def merge(one: Faults, other: Faults) -> Faults:
    """What either of them says."""
    return Faults(
        ranks=one.ranks | other.ranks,
        created=max((t for t in (one.created, other.created) if t is not None), default=None),
        initializing=one.initializing or other.initializing,
        source=", ".join(dict.fromkeys(s for s in (one.source, other.source) if s)),
        problems=tuple(dict.fromkeys((*one.problems, *other.problems))),
        unrecovered=one.unrecovered | other.unrecovered,
        exit_requested=one.exit_requested or other.exit_requested,
    )


# --- the parser: which form is it? ------------------------------------------------------------------------------------


def parse_text(text: str, *, world_size: int | None) -> Faults:
    """The faults in a text of any form.

    `world_size`: ranks from here on are a problem; None: not known. Raises ValueError, with what is wrong, for a text
    of no known form.
    """
    content = parse_json_object(text)
    is_report = any(key in content for key in _RANK_KEYS) or content.get("status") == "initializing"
    is_reset = any(key in content for key in _RESET_KEYS)
    if is_report and is_reset:
        raise ValueError("is a fault report and a reset.json at once; give them apart")
    if is_report or is_reset:
        return (_fault_npus if is_report else _reset_json)(content, world_size)
    raise ValueError(
        f"has none of the keys {', '.join((*_RANK_KEYS, *_RESET_KEYS))}: expected what stands under {FAULT_KEY} or "
        f"{RESET_KEY} in a ConfigMap"
    )


def parse_key(key: str, text: str, *, world_size: int | None = None) -> Faults:
    """The faults in the text under one key of a ConfigMap. Raises ValueError for a text of another form."""
    content = parse_json_object(text)
    return _fault_npus(content, world_size) if key == FAULT_KEY else _reset_json(content, world_size)


def _fault_npus(content: dict[str, Any], world_size: int | None) -> Faults:
    """``{"FaultRankIds": ["1"], "CreatTime": 1690000000}`` (the missing e is real), ``{"FaultRank": [1], "UpdateTime":
    ...}`` or ``{"status": "initializing"}``. The first schedulers wrote the list as text: ``"[\\"1\\"]"``."""
    listed = [key for key in _RANK_KEYS if key in content]
    initializing = not listed and content.get("status") == "initializing"
    if not listed and not initializing:
        raise ValueError(f"has none of the keys {', '.join(_RANK_KEYS)} and status")
    problems: list[str] = []
    ranks: set[int] = set()
    for key in listed:
        ranks |= _rank_list(key, _list_in_text(content[key]), world_size, problems)
    stamps = [stamp for key in _TIME_KEYS if listed and (stamp := _time_stamp(content.get(key))) is not None]
    found = frozenset(ranks)
    created = max(stamps, default=None)
    return Faults(found, created, initializing, problems=tuple(problems), unrecovered=found)


def _reset_json(content: dict[str, Any], world_size: int | None) -> Faults:
    """``{"RankList": [{"RankId": 1, "Status": "unrecovered", "Policy": "restart"}], "UpdateTime": ..., "FaultFlushing":
    false, "GracefulExit": 0}``; missing keys have their harmless value."""
    known = (*_RESET_KEYS, "UpdateTime")
    if content and not any(key in content for key in known):
        raise ValueError(f"has none of the keys {', '.join(known)}")
    entries = content.get("RankList") or []
    if not isinstance(entries, list):
        raise ValueError(f"has a RankList that is not a list but {entries!r:.60}")
    problems: list[str] = []
    asked: dict[str, list[object]] = {"unrecovered": [], "failed": []}
    for entry in entries:
        if not isinstance(entry, dict):
            problems.append(f'has {entry!r:.40} in RankList, expected {{"RankId": ..., "Status": ...}}')
            asked["unrecovered"] += [entry] if _whole_number(entry) is not None else []
            continue
        policy, status = entry.get("Policy", entry.get("InitialPolicy", "")), entry.get("Status")
        is_harmless = str(policy).strip().lower() in _HARMLESS_POLICIES
        if status == "failed" or (status == "unrecovered" and not is_harmless):
            asked[status].append(entry.get("RankId"))
        elif status not in ("unrecovered", "recovered") and not is_harmless:
            rank, known_words = entry.get("RankId"), "known: unrecovered, recovered, failed"
            problems.append(f"has the Status {status!r:.40} for rank {rank!r:.40}; {known_words}")
    unrecovered = frozenset(_rank_list("RankList", asked["unrecovered"], world_size, problems))
    return Faults(
        ranks=unrecovered | _rank_list("RankList", asked["failed"], world_size, problems),
        created=_time_stamp(content.get("UpdateTime")),
        initializing=_switch("FaultFlushing", content, problems),
        unrecovered=unrecovered,
        exit_requested=_switch("GracefulExit", content, problems),
        problems=tuple(problems),
    )


def _list_in_text(value: Any) -> Any:
    """The list (or null) that a text holds as JSON; any other value as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "n"):
        return value
    try:
        inner = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return inner if inner is None or isinstance(inner, list) else value


def _rank_list(key: str, value: Any, world_size: int | None, problems: list[str]) -> set[int]:
    if not isinstance(value, list):
        if value is None:
            return set()
        raise ValueError(f"has a {key} that is not a list but {value!r:.60}")
    ranks = set()
    for item in value:
        rank = _whole_number(item)
        if rank is None:
            problems.append(f"names {item!r:.60} in {key}, which is not a rank")
        elif world_size is not None and rank >= world_size:
            problems.append(f"names rank {rank} in {key}, but the job has ranks 0..{world_size - 1}")
        else:
            ranks.add(rank)
    return ranks


def _switch(key: str, content: dict[str, Any], problems: list[str]) -> bool:
    value = content.get(key, False)
    if isinstance(value, str):
        value = {"true": True, "1": True, "false": False, "0": False, "": False}.get(value.strip().lower(), value)
    if value is None or (isinstance(value, (bool, int)) and value in (0, 1)):
        return bool(value)
    problems.append(f'has "{key}": {value!r:.60}, expected true or false')
    return False


def _whole_number(value: object) -> int | None:
    """A rank, as a number or as text ("3"), from 0; None for anything else."""
    if isinstance(value, str) and len(value) <= 20 and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_RANK:
        return None
    return value


def _time_stamp(value: object) -> float | None:
    """Unix seconds, from seconds or milliseconds as a number or as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    return seconds / 1000 if seconds >= _MILLISECONDS_FROM else seconds


# --- read once, strictly, for a plan ----------------------------------------------------------------------------------


def read_faults(source: Path, *, world_size: int | None) -> Faults:
    """The faults that a file or a mounted folder tells of.

    * `source`: the folder of a mounted ConfigMap; one of its key files (``fault-npus``, ``reset.json``); or any file
      with a report, see the module.
    * `world_size`: number of ranks of the job that has failed; ranks from here on are an error. None: not known.

    Raises UsageError, with the path, for a file that is missing, cannot be read or is not understood in full.
    """
    if os.path.isdir(source):
        mounted = [source / key for key in _KEYS if not is_missing(source / key)]
        if not mounted:
            raise UsageError(
                f"fault report {source} is a folder with none of the files {', '.join(_KEYS)}: no mounted ConfigMap of "
                "faults"
            )
        return reduce(merge, [read_faults(path, world_size=world_size) for path in mounted])
    with named_errors(source, "fault report"):
        text, _ = read_text(source)
        is_key = source.name in _KEYS
        faults = (
            parse_key(source.name, text, world_size=world_size) if is_key else parse_text(text, world_size=world_size)
        )
        if faults.problems:
            raise ValueError("; ".join(faults.problems[:_MAX_PROBLEMS]))
        return faults._replace(source=str(source))


def default_fault_sources(paths: FaultPaths) -> tuple[Path, ...]:
    """The platform's mounted files that exist; empty: no report. One that cannot be opened is listed, and reading it
    says why."""
    return tuple(p for p in (paths.fault_dir / FAULT_KEY, paths.reset_dir / RESET_KEY) if not is_missing(p))


def parse_rank_list(text: str, *, world_size: int | None = None) -> frozenset[int]:
    """``"1,3"``, ``"0-7"``, ``"0-3, 6"``; empty for no rank. Raises UsageError for anything else."""
    ranks: set[int] = set()
    for part in text.split(",") if text.strip(" ") else []:
        found = _RANKS.fullmatch(part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UsageError(f'rank list {text!r:.80}: {part!r:.40} is neither a rank nor a range; give "1,3" or "0-7"')
        first, last = int(found[1]), int(found[2] or found[1])
        if world_size is not None and last >= world_size:
            raise UsageError(f"rank list {text!r:.80}: rank {last}, but the job has ranks 0..{world_size - 1}")
        if len(ranks) + last - first >= _MAX_LISTED:
            raise UsageError(f"rank list {text!r:.80} names more than {_MAX_LISTED} ranks")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
