"""ConfigMaps of Kubernetes, mounted as a folder, and the values that they hold.

Kubernetes mounts a ConfigMap as symbolic links into a dated folder and updates it by renaming the link ``..data``
(``pkg/volume/util/atomic_writer.go``). These files are the platform's: links are followed, and the content may be of
any quality, so reading is bounded and never blocks, and every defect is a ValueError or an OSError.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.core.fields import load_json
from mindx_elastic.platforms.small_files import read_regular

__all__ = [
    "CHECK_KEY",
    "MAX_BYTES",
    "check_data",
    "parse_json_object",
    "read_mounted",
    "read_text",
    "time_stamp",
    "whole_number",
]

MAX_BYTES = 1 << 20
"""What a ConfigMap can hold in all."""
CHECK_KEY = "checkCode"
"""The key under which MindCluster's writers store a SHA-256 of the rest."""
_MAX_RANK = 1 << 24
_MILLISECONDS_FROM = 1e11  # in seconds that would be the year 5138


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
        raise ValueError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from None


# --- one object as text -----------------------------------------------------------------------------------------------


def parse_json_object(text: str) -> dict[str, Any]:
    """The object in `text`. Raises ValueError, with what is wrong, for anything else."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        content = load_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not readable JSON yet ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds {content!r:.60} where an object {{...}} is expected")
    return content


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
    if code not in (hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in texts):
        raise ValueError(f"does not fit its {CHECK_KEY}: half-written, or changed by hand; wait, or remove that key")


# --- values -----------------------------------------------------------------------------------------------------------


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
