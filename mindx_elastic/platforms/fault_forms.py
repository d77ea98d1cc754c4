"""The forms in which a platform tells of faults, and what each says; pure, see `fault_report` for the reading of files.

A form is told by its keys, never by a file's name:

* ``fault-npus`` of the ConfigMap ``fault-config-<job>``: ``{"FaultRankIds": ["1"], "CreatTime": ...}``,
  ``{"FaultRank": [1], "UpdateTime": ...}``, ``{"status": "initializing"}``
* ``reset.json`` of ``reset-config-<job>``: ranks that are unrecovered, or whose recovery has failed
* whole nodes: ``NodeInfo`` of ``mindx-dl-nodeinfo-<node>`` and ``cluster-info-node-cm`` (both with ``"NodeStatus":
  "UnHealthy"``), ``fault-node`` of ``vcjob-fault-npu-cm``. There a faulty device takes its whole node along, as it does
  with the platform, which replaces whole pods.

Each as bare JSON text, as the ``data`` of a ConfigMap, or as the whole ConfigMap in JSON or YAML.

The parser is strict where the watcher in `fault_info` is patient: a rank that is none, or one that the job does not
have, is an error and not left out. The watcher may wait for a better file; a plan without that rank could be wrong.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindx_elastic.platforms.fault_watch import parse_fault_report, parse_reset_info
from mindx_elastic.platforms.files import MAX_BYTES, parse_json_object, time_stamp, whole_number
from mindx_elastic.platforms.rank_table import NodeMap

__all__ = ["CHECK_KEY", "DATA_KEYS", "Faults", "merge", "parse_data", "parse_text"]

CHECK_KEY = "checkCode"
DATA_KEYS = ("fault-npus", "reset.json", "NodeInfo", "cluster-info-node-cm", "fault-node")
"""Keys of a ConfigMap that tell of faults."""
_RANK_KEYS, _TIME_KEYS = ("FaultRankIds", "FaultRank"), ("CreatTime", "CreateTime", "UpdateTime")
_RESET_KEYS = ("RankList", "FaultFlushing", "GracefulExit", "RetryTime", "RestartFaultProcess")
_HARMLESS_POLICIES = ("", "empty", "ignore")
_NODE_PREFIXES = ("mindx-dl-nodeinfo-", "mindx-dl-deviceinfo-")
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?")
_DEAD, _ALIVE = ("unhealthy", "nodeunhealthy"), ("healthy", "preseparate", "subhealthy")
_MAX_EVENTS, _MAX_DEPTH = 20_000, 16


@dataclass(frozen=True)
class Faults:
    """The ranks that a plan may not rely on."""

    ranks: frozenset[int] = frozenset()
    nodes: tuple[str, ...] = ()
    """Names of the nodes that a report calls faulty; their ranks are in `ranks` only after `widened`."""
    created: float | None = None
    """The youngest time stamp in the reports, unix seconds."""
    initializing: bool = False
    """The platform has not finished: it knows nothing yet, or still clears devices (``"FaultFlushing": true``)."""
    source: str = ""
    """Where this was read; empty: nowhere."""
    problems: tuple[str, ...] = ()
    """What in it was not understood and does not matter for `ranks`; a line each, for a person."""

    @classmethod
    def none(cls) -> Faults:
        """No report: nothing is known to be faulty."""
        return cls()

    def widened(self, nodes: NodeMap) -> Faults:
        """The same with all ranks of the faulty nodes. A node that the job does not have is a problem and left out: a
        report about the whole cluster names the nodes of other jobs too."""
        ranks, known, problems = set(self.ranks), [], list(self.problems)
        for name in self.nodes:
            found = nodes.find(name)
            if found is None:
                problems.append(f"names the faulty node {name}, which this job does not have")
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
    )


# --- which form is it? ------------------------------------------------------------------------------------------------


def parse_text(text: str, *, world_size: int | None, yaml: bool = False) -> Faults:
    """Any form. `yaml`: the text may be a ConfigMap in YAML even though it opens like JSON.

    Raises ValueError, with what is wrong, for anything else.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB")
    if text.lstrip()[:1] in ("{", "[", "") and not yaml:
        content = _json_object(text)
    else:
        try:
            content = _json_object(text)
        except ValueError:
            content = _yaml_object(text)
            if not _is_config_map(content):
                raise ValueError("is neither JSON nor a ConfigMap (kind: ConfigMap) in YAML") from None
    return _parse_object(content, text, world_size)


def parse_data(data: Mapping[str, Any], *, name: str = "", world_size: int | None) -> Faults:
    """The ``data`` of the ConfigMap `name`: texts by key, and a check code. Raises ValueError as `parse_text` does."""
    found = [key for key in DATA_KEYS if data.get(key) is not None]
    if not found:
        raise ValueError(f"has none of the keys {', '.join(DATA_KEYS)}{_did_you_mean(data, DATA_KEYS)}")
    for key in (*found, CHECK_KEY):
        if not isinstance(data.get(key, ""), str):
            raise ValueError(f"has a {key} that is no text but {data[key]!r:.60}; a ConfigMap holds texts: quote it")
    _check(data, found)
    faults = Faults()
    for key in found:
        faults = merge(faults, _parse_key(key, data[key], name, world_size))
    return faults


def _parse_object(content: dict[str, Any], text: str, world_size: int | None) -> Faults:
    if _is_config_map(content):
        return _parse_config_map(content, world_size)
    if any(isinstance(content.get(key), str) for key in DATA_KEYS):
        return parse_data(content, world_size=world_size)
    is_report = any(key in content for key in _RANK_KEYS) or content.get("status") == "initializing"
    is_reset = any(key in content for key in _RESET_KEYS)
    if is_report and is_reset:
        raise ValueError("is a fault report and a reset.json at once; give them apart")
    if is_report:
        return _parse_report(text, world_size)
    if is_reset:
        return _parse_reset(text, world_size)
    if "NodeInfo" in content:
        raise ValueError("does not say which node it is about: give the whole ConfigMap, with its metadata.name")
    if any(key.startswith(_NODE_PREFIXES) for key in content):
        return _parse_cluster(text)
    expected = (*_RANK_KEYS, "status", *_RESET_KEYS)
    raise ValueError(
        f'tells of no faults in a known form; expected {{"FaultRankIds": ["1"]}}, {{"status": "initializing"}}, a '
        f"reset.json or a ConfigMap{_did_you_mean(content, expected)}"
    )


def _is_config_map(content: dict[str, Any]) -> bool:
    return "kind" in content or isinstance(content.get("data"), dict)


def _parse_config_map(content: dict[str, Any], world_size: int | None) -> Faults:
    kind, items = content.get("kind", "ConfigMap"), content.get("items")
    if isinstance(items, list):
        if len(items) == 1 and isinstance(items[0], dict) and "items" not in items[0]:
            return _parse_config_map(items[0], world_size)
        raise ValueError(f"holds {len(items)} objects; give the ConfigMap of this job alone")
    if kind != "ConfigMap":
        raise ValueError(f"is of the kind {kind!r:.40}, expected a ConfigMap")
    data, metadata = content.get("data"), content.get("metadata")
    if not isinstance(data, dict):
        raise ValueError(f"has a data section that is no object but {data!r:.60}")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return parse_data(data, name=name if isinstance(name, str) else "", world_size=world_size)


def _parse_key(key: str, text: str, name: str, world_size: int | None) -> Faults:
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB")
        if key == "fault-npus":
            return _parse_report(text, world_size)
        if key == "reset.json":
            return _parse_reset(text, world_size)
        if key == "NodeInfo":
            return _parse_node(text, name)
        return _parse_cluster(text) if key == "cluster-info-node-cm" else _parse_fault_nodes(text)
    except ValueError as error:
        raise ValueError(f"has a key {key} that {error}") from None


def _check(data: Mapping[str, Any], keys: Iterable[str]) -> None:
    """The writers hash either the text of the one key, or the whole data as Go encodes it."""
    code = data.get(CHECK_KEY, "").strip().strip("\"'").strip().lower()
    if not code:
        return
    texts = [text for key in keys for text in (data[key], data[key].strip())]
    rest = {key: value for key, value in data.items() if key != CHECK_KEY}
    if all(isinstance(value, str) for value in rest.values()):
        texts.append(_go_json(rest))
    if code not in map(_sha256, texts):
        raise ValueError(f"does not fit its {CHECK_KEY}: half-written, or changed by hand; wait, or remove that key")


def _go_json(data: dict[str, str]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- ranks ------------------------------------------------------------------------------------------------------------


def _parse_report(text: str, world_size: int | None) -> Faults:
    content = _json_object(text)
    report = parse_fault_report(text, Path(), world_size=world_size)
    if report.problems:
        raise ValueError("; ".join(report.problems))
    known = (*_RANK_KEYS, *_TIME_KEYS, "status")
    problems = []
    for key in list(content)[:8]:
        if key in _TIME_KEYS and time_stamp(content[key]) is None:
            problems.append(f"has a {key} that is no time: {content[key]!r:.60}")
        elif key not in known and (near := _did_you_mean({key: None}, known)):
            problems.append(f"has a key that is not known{near}")
    return Faults(report.ranks, created=report.created, initializing=report.initializing, problems=tuple(problems))


def _parse_reset(text: str, world_size: int | None) -> Faults:
    content = _json_object(text)
    info = parse_reset_info(text, world_size=world_size)
    if info.problems:
        raise ValueError("; ".join(info.problems))
    ranks = set(info.faulty)
    for entry in content.get("RankList") or []:
        if not isinstance(entry, dict):
            raise ValueError(f'has {entry!r:.40} in RankList, expected {{"RankId": ..., "Status": ...}}')
        policy = str(entry.get("Policy", entry.get("InitialPolicy", ""))).strip().lower()
        status = entry.get("Status")
        if status in ("unrecovered", "recovered") or (status != "failed" and policy in _HARMLESS_POLICIES):
            continue
        rank = whole_number(entry.get("RankId"))
        shown = f"{entry.get('RankId')!r:.40}"
        if status != "failed":
            raise ValueError(f"has the Status {status!r:.40} for rank {shown}; known: unrecovered, recovered, failed")
        if rank is None or (world_size is not None and rank >= world_size):
            raise ValueError(f"names {shown} in RankList, which is no rank of this job")
        ranks.add(rank)
    return Faults(frozenset(ranks), created=info.updated, initializing=info.flushing)


# --- nodes ------------------------------------------------------------------------------------------------------------


def _parse_node(text: str, name: str) -> Faults:
    """``{"NodeInfo": {"FaultDevList": [...], "NodeStatus": "UnHealthy"}, "CheckCode": "..."}``"""
    content = _json_object(text)
    prefix = next((p for p in _NODE_PREFIXES if name.startswith(p)), None)
    if prefix is None:
        raise ValueError(f"is about the ConfigMap {name!r:.80}; expected the name {_NODE_PREFIXES[0]}<node>")
    parts = re.fullmatch(r'\s*\{"NodeInfo":(.*),"CheckCode":"([0-9A-Fa-f]{64})"\}\s*', text, re.DOTALL)
    if parts and _sha256(parts[1]) != parts[2].lower():
        raise ValueError("does not fit its CheckCode: half-written or changed by hand; read it again")
    return _nodes({name: content.get("NodeInfo")})


def _parse_cluster(text: str) -> Faults:
    """``{"mindx-dl-nodeinfo-<node>": {"FaultDevList": [...], "NodeStatus": "UnHealthy"}, ...}``"""
    return _nodes({key: value for key, value in _json_object(text).items() if key.startswith(_NODE_PREFIXES)})


def _nodes(entries: Mapping[str, Any]) -> Faults:
    dead, problems = [], []
    for key, entry in entries.items():
        name = _node_name(key.removeprefix(_NODE_PREFIXES[0]).removeprefix(_NODE_PREFIXES[1]))
        info = entry.get("NodeInfo", entry) if isinstance(entry, dict) else None
        status = info.get("NodeStatus") if isinstance(info, dict) else None
        word = status.strip().lower() if isinstance(status, str) else ""
        if word in _DEAD:
            dead.append(name)
        elif word not in _ALIVE:
            problems.append(f"has no known NodeStatus for the node {name} ({status!r:.40}); it counts as healthy")
    return Faults(nodes=tuple(dict.fromkeys(dead)), problems=tuple(problems[:8]))


def _parse_fault_nodes(text: str) -> Faults:
    """``[{"NodeName": ..., "NodeHealthState": ..., "UnhealthyNPU": [...], "FaultDeviceList": [...]}, ...]``"""
    entries = json.loads(text, object_pairs_hook=_unique) if text.strip() else []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("is no list of nodes")
    dead = [_node_name(entry.get("NodeName")) for entry in entries if _is_faulty(entry)]
    created = max((t for e in entries if (t := time_stamp(e.get("UpdateTime"))) is not None), default=None)
    return Faults(nodes=tuple(dict.fromkeys(dead)), created=created)


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


# --- text to objects --------------------------------------------------------------------------------------------------


def _json_object(text: str) -> dict[str, Any]:
    """As `parse_json_object`, and no key twice: the two readings of such a text differ."""
    content = parse_json_object(text)
    json.loads(text, object_pairs_hook=_unique)
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"has the key {twice[:60]!r} twice")
    return found


def _yaml_object(text: str) -> dict[str, Any]:
    """Without anchors (a small file could become a huge value) and tags (they ask for types), and bounded."""
    import yaml  # not for `import mindx_elastic`

    try:
        depth = 0
        for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if number > _MAX_EVENTS or depth > _MAX_DEPTH:
                raise ValueError("is YAML with too many or too deeply nested values for a ConfigMap")
            if isinstance(event, yaml.NodeEvent) and (event.anchor or getattr(event, "tag", None)):
                raise ValueError("is YAML with anchors or tags, which a ConfigMap does not need")
        _refuse_double_keys(yaml.compose(text, Loader=yaml.SafeLoader), yaml.MappingNode)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, OverflowError, RecursionError) as error:
        raise ValueError(f"is neither JSON nor readable YAML ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"holds {content!r:.60} where a ConfigMap is expected")
    return content


def _refuse_double_keys(node: Any, mapping: type) -> None:
    """Of the document and of its sections: in ``data`` a second value would replace the first."""
    if not isinstance(node, mapping):
        return
    seen = set()
    for key, value in node.value:  # type: ignore[attr-defined]
        name = str(key.value)
        if name in seen:
            raise ValueError(f"has the key {name[:60]!r} twice")
        seen.add(name)
        _refuse_double_keys(value, mapping)


def _did_you_mean(content: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    for name in list(content)[:20]:
        near = difflib.get_close_matches(str(name)[:60], keys, 1, 0.75) if name not in keys else []
        if near:
            return f"; is {str(name)[:60]!r} meant to be {near[0]}?"
    return ""
