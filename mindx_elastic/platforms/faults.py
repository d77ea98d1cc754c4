"""Faults that a platform reports: what each form says, and all of them read once for a plan.

The keys tell the forms apart, never a file's name:

* ``fault-npus`` of the ConfigMap ``fault-config-<job>``: ``{"FaultRankIds": ["1"], "CreatTime": ...}``,
  ``{"FaultRank": [1], "UpdateTime": ...}``, ``{"status": "initializing"}``
* ``reset.json`` of ``reset-config-<job>``: ranks that are unrecovered or whose recovery has failed, ``GracefulExit``,
  ``FaultFlushing``
* whole nodes: ``NodeInfo`` of ``mindx-dl-nodeinfo-<node>`` and ``cluster-info-node-cm`` (both with ``"NodeStatus":
  "UnHealthy"``), ``fault-node`` of ``vcjob-fault-npu-cm``. There a faulty device takes its whole node along, as it does
  with the platform, which replaces whole pods.

Each as bare JSON text, as the ``data`` of a ConfigMap, or as the whole ConfigMap in JSON or YAML (``kubectl get
configmap ... -o yaml``). Source: MindCluster's (formerly MindX DL) manual, chapters on resumable training, and the
sources of its components Volcano, NodeD and ClusterD.

One parser serves two callers. What it does not understand is left out and listed in `Faults.problems`. `fault_watch`
logs the problems and goes on: a better file may come. `read_faults` raises on them: a plan made from half a report
could be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindx_elastic.config import FaultPaths
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.config_map import (
    CHECK_KEY,
    MAX_BYTES,
    check_data,
    data_of,
    did_you_mean,
    load_json,
    parse_json_object,
    parse_yaml_object,
    read_mounted,
    read_text,
    sha256,
    time_stamp,
    whole_number,
)
from mindx_elastic.platforms.nodes import NodeMap
from mindx_elastic.platforms.small_files import named_errors

__all__ = [
    "FAULT_KEY",
    "RESET_KEY",
    "Faults",
    "Problem",
    "default_fault_sources",
    "merge",
    "parse_key",
    "parse_rank_list",
    "parse_text",
    "read_faults",
]

FAULT_KEY, RESET_KEY = "fault-npus", "reset.json"
"""Mounted into the containers of a job; the other keys are for the services of the cluster."""
_KEYS = (FAULT_KEY, RESET_KEY, "NodeInfo", "cluster-info-node-cm", "fault-node")
"""Keys of a ConfigMap that tell of faults."""
_COMPANIONS = (CHECK_KEY, "restartType")  # the check code of a reset-config may cover both
_RANK_KEYS, _TIME_KEYS = ("FaultRankIds", "FaultRank"), ("CreatTime", "CreateTime", "UpdateTime")
_RESET_KEYS = ("RankList", "FaultFlushing", "GracefulExit", "RetryTime", "RestartFaultProcess")
_HARMLESS_POLICIES = ("", "empty", "ignore")
_NODE_PREFIXES = ("mindx-dl-nodeinfo-", "mindx-dl-deviceinfo-")
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?")
_DEAD, _ALIVE = ("unhealthy", "nodeunhealthy"), ("healthy", "preseparate", "subhealthy")
_MAX_LISTED = 1 << 20
_MAX_PROBLEMS = 8  # in a line for a person


@dataclass(frozen=True)
class Problem:
    """A part of a report that was not understood and was left out."""

    what: str
    """For a person, after the report's name: ``names rank 8, but the job has ranks 0..7``."""
    where: str = ""
    """The key of the ConfigMap that holds it; empty: the text itself."""
    matters: bool = True
    """Whether `Faults.ranks` could be wrong because of it."""

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Faults:
    """What a platform says of faulty ranks and nodes."""

    ranks: frozenset[int] = frozenset()
    """The ranks that a plan may not rely on."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that a report calls faulty; their ranks are in `ranks` only after `widened`."""
    created: float | None = None
    """The youngest time stamp in the reports, unix seconds."""
    initializing: bool = False
    """The platform has not finished: it knows nothing yet, or still clears devices (``"FaultFlushing": true``)."""
    source: str = ""
    """Where this was read; empty: nowhere."""
    problems: tuple[Problem, ...] = ()
    unrecovered: frozenset[int] = frozenset()
    """Those of `ranks` for which a running job has to stop; the others are ranks whose recovery has failed."""
    exit_requested: bool = False
    """``"GracefulExit": 1``: the job is to save and leave."""

    @classmethod
    def none(cls) -> Faults:
        """No report: nothing is known to be faulty."""
        return cls()

    @property
    def serious_problems(self) -> tuple[Problem, ...]:
        """Those because of which `ranks` could be wrong."""
        return tuple(problem for problem in self.problems if problem.matters)

    def widened(self, nodes: NodeMap) -> Faults:
        """The same with all ranks of the faulty nodes. A node that the job does not have is a problem and left out: a
        report about the whole cluster names the nodes of other jobs too."""
        ranks, known, problems = set(self.ranks), [], list(self.problems)
        for name in self.nodes:
            found = nodes.find(name)
            if found is None:
                text = f"names the faulty node {name}, which this job does not have"
                problems.append(Problem(text, matters=False))
            else:
                ranks |= found
                known.append(name)
        return replace(self, ranks=frozenset(ranks), nodes=tuple(known), problems=tuple(dict.fromkeys(problems)))


def merge(one: Faults, other: Faults) -> Faults:
    """What either of them says."""
    return Faults(
        ranks=one.ranks | other.ranks,
        nodes=tuple(dict.fromkeys((*one.nodes, *other.nodes))),
        created=max((t for t in (one.created, other.created) if t is not None), default=None),
        initializing=one.initializing or other.initializing,
        source=", ".join(dict.fromkeys(s for s in (one.source, other.source) if s)),
        problems=tuple(dict.fromkeys((*one.problems, *other.problems))),
        unrecovered=one.unrecovered | other.unrecovered,
        exit_requested=one.exit_requested or other.exit_requested,
    )


# --- the parser: which form is it? ------------------------------------------------------------------------------------


def parse_text(text: str, *, world_size: int | None, yaml: bool = False) -> Faults:
    """The faults in a text of any form.

    * `world_size`: ranks from here on are a problem; None: not known.
    * `yaml`: the text may be a ConfigMap in YAML even though it opens like JSON.

    Raises ValueError, with what is wrong, for a text of no known form.
    """
    _check_size(text)
    problems: list[Problem] = []
    try:
        content = _json_object(text, problems)
    except ValueError:
        if text.lstrip()[:1] in ("{", "[", "") and not yaml:
            raise
        content = parse_yaml_object(text)
        if data_of(content) is None:
            raise ValueError("is neither JSON nor a ConfigMap (kind: ConfigMap) in YAML") from None
    config_map = data_of(content)
    if config_map is not None:
        return _with_problems(_parse_data(*config_map, world_size), problems)
    if any(isinstance(content.get(key), str) for key in _KEYS):
        return _with_problems(_parse_data(content, "", world_size), problems)
    is_report = any(key in content for key in _RANK_KEYS) or content.get("status") == "initializing"
    is_reset = any(key in content for key in _RESET_KEYS)
    if is_report and is_reset:
        raise ValueError("is a fault report and a reset.json at once; give them apart")
    if is_report:
        return _fault_npus(content, world_size, problems)
    if is_reset:
        return _reset_json(content, world_size, problems)
    if "NodeInfo" in content:
        raise ValueError("does not say which node it is about: give the whole ConfigMap, with its metadata.name")
    if any(key.startswith(_NODE_PREFIXES) for key in content):
        return _cluster_nodes(content, problems)
    expected = (*_RANK_KEYS, "status", *_RESET_KEYS)
    raise ValueError(
        f'tells of no faults in a known form; expected {{"FaultRankIds": ["1"]}}, {{"status": "initializing"}}, a '
        f"reset.json or a ConfigMap{did_you_mean(content, expected)}"
    )


def parse_key(key: str, text: str, *, name: str = "", world_size: int | None = None) -> Faults:
    """The faults in the text under one key of the ConfigMap `name`. Raises ValueError for a text of another form."""
    _check_size(text)
    problems: list[Problem] = []
    if key == "fault-node":
        return _scheduler_nodes(text, problems)
    content = _json_object(text, problems)
    if key == FAULT_KEY:
        return _fault_npus(content, world_size, problems)
    if key == RESET_KEY:
        return _reset_json(content, world_size, problems)
    return _node(content, text, name, problems) if key == "NodeInfo" else _cluster_nodes(content, problems)


def _parse_data(data: Mapping[str, Any], name: str, world_size: int | None) -> Faults:
    """The ``data`` of the ConfigMap `name`: texts by key, and a check code."""
    found = [key for key in _KEYS if data.get(key) is not None]
    if not found:
        raise ValueError(f"has none of the keys {', '.join(_KEYS)}{did_you_mean(data, _KEYS)}")
    for key in (*found, CHECK_KEY):
        if not isinstance(data.get(key, ""), str):
            raise ValueError(f"has a {key} that is no text but {data[key]!r:.60}; a ConfigMap holds texts: quote it")
    check_data(data, found)
    faults = Faults()
    for key in found:
        try:
            part = parse_key(key, data[key], name=name, world_size=world_size)
        except ValueError as error:
            raise ValueError(f"has a key {key} that {error}") from None
        located = tuple(replace(problem, where=key) for problem in part.problems)
        faults = merge(faults, replace(part, problems=located))
    return faults


def _check_size(text: str) -> None:
    if len(text) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB")


def _json_object(text: str, problems: list[Problem]) -> dict[str, Any]:
    twice: list[str] = []
    content = parse_json_object(text, twice)
    problems += _doubles(twice)
    return content


def _doubles(keys: list[str]) -> list[Problem]:
    return [Problem(f"has the key {key[:60]!r} twice") for key in keys[:_MAX_PROBLEMS]]


def _with_problems(faults: Faults, problems: list[Problem]) -> Faults:
    return replace(faults, problems=(*problems, *faults.problems))


# --- ranks ------------------------------------------------------------------------------------------------------------


def _fault_npus(content: dict[str, Any], world_size: int | None, problems: list[Problem]) -> Faults:
    """``{"FaultRankIds": ["1"], "CreatTime": 1690000000}`` (the missing e is real), ``{"FaultRank": [1], "UpdateTime":
    ...}`` or ``{"status": "initializing"}``. The first schedulers wrote the list as text: ``"[\\"1\\"]"``."""
    listed = [key for key in _RANK_KEYS if key in content]
    initializing = not listed and content.get("status") == "initializing"
    if not listed and not initializing:
        raise ValueError(f"has none of the keys {', '.join(_RANK_KEYS)} and status{did_you_mean(content, _RANK_KEYS)}")
    ranks: set[int] = set()
    for key in listed:
        ranks |= _rank_list(key, _list_in_text(content[key]), world_size, problems)
    known = (*_RANK_KEYS, *_TIME_KEYS, "status")
    for key in list(content)[:_MAX_PROBLEMS]:
        if key in _TIME_KEYS and time_stamp(content[key]) is None:
            problems.append(Problem(f"has a {key} that is no time: {content[key]!r:.60}", matters=False))
        elif key not in known and (near := did_you_mean([key], known)):
            problems.append(Problem(f"has a key that is not known{near}", matters=False))
    created = max((t for key in _TIME_KEYS if (t := time_stamp(content.get(key))) is not None), default=None)
    found = frozenset(ranks)
    return Faults(found, (), created if listed else None, initializing, "", tuple(problems), found)


def _reset_json(content: dict[str, Any], world_size: int | None, problems: list[Problem]) -> Faults:
    """``{"RankList": [{"RankId": 1, "Status": "unrecovered", "Policy": "restart"}], "UpdateTime": ..., "FaultFlushing":
    false, "GracefulExit": 0}``; missing keys have their harmless value."""
    known = (*_RESET_KEYS, "UpdateTime")
    if content and not any(key in content for key in known):
        raise ValueError(f"has none of the keys {', '.join(known)}{did_you_mean(content, known)}")
    entries = content.get("RankList") or []
    if not isinstance(entries, list):
        raise ValueError(f"has a RankList that is no list but {entries!r:.60}")
    asked: dict[str, list[object]] = {"unrecovered": [], "failed": []}
    for entry in entries:
        if not isinstance(entry, dict):
            asked["unrecovered"].append(entry)
            if whole_number(entry) is not None:
                problems.append(Problem(f'has {entry!r:.40} in RankList, expected {{"RankId": ..., "Status": ...}}'))
            continue
        policy, status = entry.get("Policy", entry.get("InitialPolicy", "")), entry.get("Status")
        is_harmless = str(policy).strip().lower() in _HARMLESS_POLICIES
        if status == "failed" or (status == "unrecovered" and not is_harmless):
            asked[status].append(entry.get("RankId"))
        elif status not in ("unrecovered", "recovered") and not is_harmless:
            rank = f"{entry.get('RankId')!r:.40}"
            known_words = "known: unrecovered, recovered, failed"
            problems.append(Problem(f"has the Status {status!r:.40} for rank {rank}; {known_words}"))
    unrecovered = frozenset(_rank_list("RankList", asked["unrecovered"], world_size, problems))
    return Faults(
        ranks=unrecovered | _rank_list("RankList", asked["failed"], world_size, problems),
        created=time_stamp(content.get("UpdateTime")),
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


def _rank_list(key: str, value: Any, world_size: int | None, problems: list[Problem]) -> set[int]:
    if not isinstance(value, list):
        if value is None:
            return set()
        raise ValueError(f"has a {key} that is no list but {value!r:.60}")
    ranks, wrong = set(), []
    for item in value:
        rank = whole_number(item)
        if rank is None:
            wrong.append(f"names {item!r:.60} in {key}, which is no rank")
        elif world_size is not None and rank >= world_size:
            wrong.append(f"names rank {rank} in {key}, but the job has ranks 0..{world_size - 1}")
        else:
            ranks.add(rank)
    problems += map(Problem, wrong[:_MAX_PROBLEMS])
    return ranks


def _switch(key: str, content: dict[str, Any], problems: list[Problem]) -> bool:
    value = content.get(key, False)
    if isinstance(value, str):
        value = {"true": True, "1": True, "false": False, "0": False, "": False}.get(value.strip().lower(), value)
    if value is None or (isinstance(value, (bool, int)) and value in (0, 1)):
        return bool(value)
    problems.append(Problem(f'has "{key}": {value!r:.60}, expected true or false'))
    return False


# --- nodes ------------------------------------------------------------------------------------------------------------


def _node(content: dict[str, Any], text: str, name: str, problems: list[Problem]) -> Faults:
    """``{"NodeInfo": {"FaultDevList": [...], "NodeStatus": "UnHealthy"}, "CheckCode": "..."}``"""
    if not name.startswith(_NODE_PREFIXES):
        raise ValueError(f"is about the ConfigMap {name!r:.80}; expected the name {_NODE_PREFIXES[0]}<node>")
    parts = re.fullmatch(r'\s*\{"NodeInfo":(.*),"CheckCode":"([0-9A-Fa-f]{64})"\}\s*', text, re.DOTALL)
    if parts and sha256(parts[1]) != parts[2].lower():
        raise ValueError("does not fit its CheckCode: half-written or changed by hand; read it again")
    return _cluster_nodes({name: content.get("NodeInfo")}, problems)


def _cluster_nodes(content: Mapping[str, Any], problems: list[Problem]) -> Faults:
    """``{"mindx-dl-nodeinfo-<node>": {"FaultDevList": [...], "NodeStatus": "UnHealthy"}, ...}``"""
    dead, unknown = [], []
    for key, entry in content.items():
        if not key.startswith(_NODE_PREFIXES):
            continue
        name = _node_name(key.removeprefix(_NODE_PREFIXES[0]).removeprefix(_NODE_PREFIXES[1]))
        info = entry.get("NodeInfo", entry) if isinstance(entry, dict) else None
        status = info.get("NodeStatus") if isinstance(info, dict) else None
        word = status.strip().lower() if isinstance(status, str) else ""
        if word in _DEAD:
            dead.append(name)
        elif word not in _ALIVE:
            text = f"has no known NodeStatus for the node {name} ({status!r:.40}); it counts as healthy"
            unknown.append(Problem(text, matters=False))
    return Faults(nodes=tuple(dict.fromkeys(dead)), problems=(*problems, *unknown[:_MAX_PROBLEMS]))


def _scheduler_nodes(text: str, problems: list[Problem]) -> Faults:
    """``[{"NodeName": ..., "NodeHealthState": ..., "UnhealthyNPU": [...], "FaultDeviceList": [...]}, ...]``"""
    twice: list[str] = []
    entries = load_json(text, twice) if text.strip() else []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("is no list of nodes")
    dead = [_node_name(entry.get("NodeName")) for entry in entries if _is_faulty(entry)]
    created = max((t for e in entries if (t := time_stamp(e.get("UpdateTime"))) is not None), default=None)
    return Faults(nodes=tuple(dict.fromkeys(dead)), created=created, problems=(*problems, *_doubles(twice)))


def _is_faulty(entry: dict[str, Any]) -> bool:
    if isinstance(entry.get("IsFaultNode"), bool):  # the scheduler's own judgement
        return bool(entry["IsFaultNode"])
    state = entry.get("NodeHealthState")
    if isinstance(state, str) and state.strip().lower() in _DEAD:
        return True
    devices = entry.get("FaultDeviceList")
    devices = devices if isinstance(devices, list) else []
    dead = any(isinstance(device, dict) and device.get("fault_type") == "NodeUnhealthy" for device in devices)
    return bool(dead or entry.get("UnhealthyNPU") or entry.get("NetworkUnhealthyNPU"))


def _node_name(value: Any) -> str:
    if not isinstance(value, str) or not _NODE_NAME.fullmatch(value):
        raise ValueError(f"names {value!r:.80}, which is no name of a node")
    return value


# --- read once, strictly, for a plan ----------------------------------------------------------------------------------


def read_faults(source: Path, *, world_size: int | None, nodes: NodeMap | None = None) -> Faults:
    """The faults that a file or a mounted folder tells of, with all ranks of the nodes that it calls faulty.

    * `source`: the folder of a mounted ConfigMap; one of its key files (``fault-npus``, ``reset.json``), which is
      checked against the ``checkCode`` beside it; or any file with a report, see the module.
    * `world_size`: number of ranks of the job that has failed; ranks from here on are an error. None: not known.
    * `nodes`: which ranks a node has; needed only for a report that names nodes.

    Raises UsageError, with the path, for a file that is missing, cannot be read or is not understood in full.
    """
    with named_errors(source, "fault report"):
        faults = replace(_read(source, world_size), source=str(source))
        serious = faults.serious_problems[:_MAX_PROBLEMS]
        if serious:
            raise ValueError("; ".join(f"has a key {p.where} that {p}" if p.where else str(p) for p in serious))
        if not faults.nodes:
            return faults
        if nodes is None:
            names = ", ".join(faults.nodes[:8])
            raise ValueError(
                f"calls whole nodes faulty ({names}), and their ranks are not known: give the rank table "
                "(MINDX_RANK_TABLE), run under torchrun, or name the ranks yourself"
            )
        faults = faults.widened(nodes)
        if world_size is not None and max(faults.ranks, default=0) >= world_size:
            raise ValueError(
                f"calls nodes faulty that have rank {max(faults.ranks)}, but the job has ranks 0..{world_size - 1}: "
                "the rank table is that of another job"
            )
        return faults


def _read(source: Path, world_size: int | None) -> Faults:
    if source.is_dir():
        return _read_mount(source, _KEYS, world_size)
    if source.name in (FAULT_KEY, RESET_KEY):
        return _read_mount(source.parent, (source.name,), world_size)
    text, _ = read_text(source)
    return parse_text(text, world_size=world_size, yaml=source.suffix.lower() in (".yaml", ".yml"))


def _read_mount(folder: Path, keys: tuple[str, ...], world_size: int | None) -> Faults:
    names = (*keys, *_COMPANIONS)
    found = read_mounted(folder, *names)
    data = {name: file[0] for name, file in zip(names, found, strict=True) if file is not None}
    if not any(key in data for key in keys):
        if len(keys) == 1:
            raise FileNotFoundError(2, "no such file")
        raise ValueError(f"is a folder with none of the files {FAULT_KEY}, {RESET_KEY}: no mounted ConfigMap of faults")
    if sum(map(len, data.values())) > 2 * MAX_BYTES:
        raise ValueError(f"holds more than {MAX_BYTES >> 19} MiB")
    return _parse_data(data, "", world_size)


def default_fault_sources(paths: FaultPaths) -> tuple[Path, ...]:
    """The platform's mounted files that exist; empty: no report. One that cannot be opened is listed, and reading it
    says why."""
    return tuple(p for p in (paths.fault_dir / FAULT_KEY, paths.reset_dir / RESET_KEY) if not _is_missing(p))


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def parse_rank_list(text: str, *, world_size: int | None = None) -> frozenset[int]:
    """``"1,3"``, ``"0-7"``, ``"0-3, 6"``; empty for no rank. Raises UsageError for anything else."""
    # Looked at by character: `str.strip` takes separators like \x1c for space.
    strange = next((c for c in text if c not in "0123456789,- "), None)
    if strange is not None:
        raise UsageError(f'rank list {text!r:.80}: {strange!r} does not belong there; give "1,3" or "0-7"')
    ranks: set[int] = set()
    listed = 0
    for part in text.split(",") if text.strip() else []:
        first_text, dash, last_text = part.partition("-")
        first = whole_number(first_text)
        last = whole_number(last_text) if dash else first
        if first is None or last is None:
            raise UsageError(f'rank list {text!r:.80}: {part.strip()!r:.40} is no rank; give "1,3" or "0-7"')
        if last < first:
            raise UsageError(f"rank list {text!r:.80}: the range {part.strip()!r:.40} counts down")
        if world_size is not None and last >= world_size:
            raise UsageError(f"rank list {text!r:.80}: rank {last}, but the job has ranks 0..{world_size - 1}")
        listed += last - first + 1
        if listed > _MAX_LISTED:
            raise UsageError(f"rank list {text!r:.80} names more than {_MAX_LISTED} ranks")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
