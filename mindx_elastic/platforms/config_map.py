"""Files of a platform, as Kubernetes mounts ConfigMaps (links into a dated folder), and the values that they hold.

Links are followed, and the content may be of any quality, so reading is bounded and never blocks, and every defect is a
ValueError or an OSError.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mindx_elastic.core.fields import load_json
from mindx_elastic.platforms.small_files import read_regular

__all__ = [
    "MAX_BYTES",
    "parse_json_object",
    "read_text",
    "time_stamp",
    "whole_number",
]

MAX_BYTES = 1 << 20
"""What a ConfigMap can hold in all."""
_MAX_RANK = 1 << 24
_MILLISECONDS_FROM = 1e11  # in seconds that would be the year 5138


# --- files ------------------------------------------------------------------------------------------------------------


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
