"""Small files that the platform writes and this job reads: ConfigMap mounts, the rank table.

Kubernetes mounts a ConfigMap as symbolic links into a dated folder and updates it by renaming the link ``..data``.
Unlike checkpoints these files are the platform's, so links are followed. Whatever lies there is taken as input of
unknown quality: bounded in size, never blocking (a pipe, a device), and every defect is a ValueError or OSError.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

__all__ = [
    "MAX_BYTES",
    "parse_json_object",
    "read_json_object",
    "read_mounted",
    "read_small_file",
    "time_stamp",
    "whole_number",
]

MAX_BYTES = 1 << 20
"""What a ConfigMap can hold in all."""
_MAX_RANK = 1 << 24
_MILLISECONDS_FROM = 1e11  # in seconds that would be the year 5138


def read_mounted(folder: Path, *names: str) -> list[tuple[str, float] | None]:
    """Text and modification time of several files of one mount, all from the same update; None for one that is missing.

    Raises OSError or ValueError as `read_small_file` does.
    """
    target = _data_folder(folder)
    for _ in range(3):
        found: list[tuple[str, float] | None] = []
        for name in names:
            try:
                found.append(read_small_file(target / name))
            except FileNotFoundError:
                found.append(None)
        before, target = target, _data_folder(folder)
        if target == before:
            break
    return found


def _data_folder(folder: Path) -> Path:
    """Where the files of a mount lie at this moment: the target of ``..data``, or the folder itself where it is a plain
    one."""
    link = folder / "..data"
    return Path(os.path.realpath(link)) if link.is_symlink() else folder


def read_small_file(path: Path) -> tuple[str, float]:
    """Text and modification time (unix seconds) of a file. Raises OSError, or ValueError with what is wrong."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig"), status.st_mtime
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8 text ({error.reason} at byte {error.start})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object. Raises OSError, or ValueError with what is wrong."""
    return parse_json_object(read_small_file(path)[0])


def parse_json_object(text: str) -> dict[str, Any]:
    """Raises ValueError with what is wrong."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not readable JSON yet ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds {content!r:.60} where an object {{...}} is expected")
    return content


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
