"""ConfigMaps of Kubernetes: as a mounted folder, as one object in JSON or YAML, and the values that they hold.

Kubernetes mounts a ConfigMap as symbolic links into a dated folder and updates it by renaming the link ``..data``
(``pkg/volume/util/atomic_writer.go``). These files are the platform's: links are followed, and the content may be of
any quality, so reading is bounded and never blocks, and every defect is a ValueError or an OSError.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.platforms.small_files import read_regular

__all__ = [
    "CHECK_KEY",
    "MAX_BYTES",
    "check_data",
    "data_of",
    "did_you_mean",
    "load_json",
    "parse_json_object",
    "parse_yaml_object",
    "read_mounted",
    "read_text",
    "sha256",
    "time_stamp",
    "whole_number",
]

MAX_BYTES = 1 << 20
"""What a ConfigMap can hold in all."""
CHECK_KEY = "checkCode"
"""The key under which MindCluster's writers store a SHA-256 of the rest."""
_MAX_RANK = 1 << 24
_MILLISECONDS_FROM = 1e11  # in seconds that would be the year 5138
_MAX_EVENTS, _MAX_DEPTH = 20_000, 16  # of YAML


# --- files ------------------------------------------------------------------------------------------------------------


def read_mounted(folder: Path, *names: str) -> list[tuple[str, float] | None]:
    """Text and modification time of several files of one mount, all from the same update; None for a missing one.

    Raises OSError or ValueError as `read_text` does.
    """
    target = _data_folder(folder)
    for _ in range(3):
        found: list[tuple[str, float] | None] = []
        for name in names:
            try:
                found.append(read_text(target / name))
            except FileNotFoundError:
                found.append(None)
        before, target = target, _data_folder(folder)
        if target == before:
            break
    return found


def _data_folder(folder: Path) -> Path:
    """The folder that holds the files of a mount at this moment: the target of ``..data``, or a plain folder itself."""
    link = folder / "..data"
    return Path(os.path.realpath(link)) if link.is_symlink() else folder


def read_text(path: Path) -> tuple[str, float]:
    """Text and modification time (unix seconds) of a file. Raises OSError, or ValueError with what is wrong."""
    data, status = read_regular(path, MAX_BYTES, follow_links=True)
    try:
        return data.decode("utf-8-sig"), status.st_mtime
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8 text ({error.reason} at byte {error.start})") from None


# --- one object as text -----------------------------------------------------------------------------------------------


def load_json(text: str, twice: list[str] | None = None) -> Any:
    """The value in `text`. Keys that an object has twice are appended to `twice`; the last one counts.

    Raises ValueError with what is wrong.
    """

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if twice is not None and len(found) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice.extend(key for key, count in counts.items() if count > 1)
        return found

    try:
        return json.loads(text, object_pairs_hook=keep)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not readable JSON yet ({error})") from None


def parse_json_object(text: str, twice: list[str] | None = None) -> dict[str, Any]:
    """As `load_json`, and ValueError for anything but an object."""
    content = load_json(text, twice)
    if not isinstance(content, dict):
        raise ValueError(f"holds {content!r:.60} where an object {{...}} is expected")
    return content


def parse_yaml_object(text: str) -> dict[str, Any]:
    """Bounded, without anchors (a small file could become a huge value) and without tags (they ask for types)."""
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
    """In the document and its sections: in ``data`` a second value would replace the first."""
    if not isinstance(node, mapping):
        return
    seen = set()
    for key, value in node.value:  # type: ignore[attr-defined]
        name = str(key.value)
        if name in seen:
            raise ValueError(f"has the key {name[:60]!r} twice")
        seen.add(name)
        _refuse_double_keys(value, mapping)


def data_of(content: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The ``data`` and the name of a ConfigMap, or of a list of one; None for an object of another shape.

    Raises ValueError for an object of another kind and for a list of several.
    """
    if "kind" not in content and not isinstance(content.get("data"), dict):
        return None
    kind, items = content.get("kind", "ConfigMap"), content.get("items")
    if isinstance(items, list):
        if len(items) == 1 and isinstance(items[0], dict) and "items" not in items[0]:
            return data_of({"kind": "ConfigMap", **items[0]})
        raise ValueError(f"holds {len(items)} objects; give the ConfigMap of this job alone")
    if kind != "ConfigMap":
        raise ValueError(f"is of the kind {kind!r:.40}, expected a ConfigMap")
    data, metadata = content.get("data"), content.get("metadata")
    if not isinstance(data, dict):
        raise ValueError(f"has a data section that is no object but {data!r:.60}")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return data, name if isinstance(name, str) else ""


def check_data(data: Mapping[str, str], keys: Iterable[str]) -> None:
    """Compare ``checkCode`` with `data`: its writers hash the text of the one key, or the whole data as Go encodes it.

    Raises ValueError where neither fits; without a code it checks nothing.
    """
    code = data.get(CHECK_KEY, "").strip().strip("\"'").strip().lower()
    if not code:
        return
    texts = [text for key in keys for text in (data[key], data[key].strip())]
    rest = {key: value for key, value in data.items() if key != CHECK_KEY}
    if all(isinstance(value, str) for value in rest.values()):
        encoded = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        texts.append(encoded.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}))
    if code not in map(sha256, texts):
        raise ValueError(f"does not fit its {CHECK_KEY}: half-written, or changed by hand; wait, or remove that key")


def sha256(text: str) -> str:
    """In hexadecimal, lower case."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- values -----------------------------------------------------------------------------------------------------------


def did_you_mean(content: Iterable[object], keys: tuple[str, ...]) -> str:
    """``; is 'FaultRanks' meant to be FaultRank?`` for the first of `content` that looks like one of `keys`."""
    for name in map(str, list(content)[:20]):
        near = difflib.get_close_matches(name[:60], keys, 1, 0.75) if name not in keys else []
        if near:
            return f"; is {name[:60]!r} meant to be {near[0]}?"
    return ""


def whole_number(value: object) -> int | None:
    """A rank, as a number or as text ("3"), from 0; None for anything else."""
    if isinstance(value, str) and len(value) <= 20 and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_RANK:
        return None
    return value


def time_stamp(value: object) -> float | None:
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
