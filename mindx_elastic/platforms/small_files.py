"""Small files that this process shares with others: bounded reading, and writing whole or not at all.

Those of a platform may be of any quality (half-written, too large); Kubernetes mounts them as links into a dated
folder. Reading never blocks, and every defect is a ValueError or an OSError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindx_elastic.core.fields import load_json
from mindx_elastic.core.posix import open_regular
from mindx_elastic.errors import SaveError, StrPath, UsageError
from mindx_elastic.persist.storage import make_directory_durable, new_file

__all__ = [
    "MAX_FILE_BYTES",
    "ArgumentTypeError",
    "named_errors",
    "parse_json_object",
    "read_bounded",
    "read_regular",
    "read_text",
    "write_whole",
]

MAX_FILE_BYTES = 64 << 20
_MAX_TEXT_BYTES = 1 << 20
"""What a ConfigMap can hold in all."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a wrong type, where MindSpore's function of the same name raises TypeError."""


def read_regular(path: StrPath, limit: int, *, follow_links: bool) -> tuple[bytes, os.stat_result]:
    """Content and status of a regular file of at most `limit` bytes; never blocks on a pipe.

    Raises OSError, or ValueError with what is wrong.
    """
    try:
        fd = open_regular(path, follow_link=follow_links)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError("is not a regular file") from None
        raise
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        data = file.read(limit + 1)
    if len(data) > limit:
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
        raise ValueError(f"is larger than {size}")
    return data, status


def read_text(path: Path) -> tuple[str, os.stat_result]:
    """Text and status of a platform's file. Raises OSError, or ValueError with what is wrong."""
    data, status = read_regular(path, _MAX_TEXT_BYTES, follow_links=True)
    try:
        return data.decode("utf-8-sig"), status
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from None


def parse_json_object(text: str) -> dict[str, Any]:
    """The object in `text`. Raises ValueError, with what is wrong, for anything else."""
    try:
        content = load_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not readable JSON yet ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds {content!r:.60} where an object {{...}} is expected")
    return content


def read_bounded(path: StrPath, what: str) -> bytes:
    """The bytes of a file next to checkpoints: regular, no link, not empty, at most `MAX_FILE_BYTES`.

    `what` names the kind of file. Raises UsageError with what is wrong.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"{path!r:.80} where the path of a {what} should be")
    with named_errors(path, what):
        data, _ = read_regular(path, MAX_FILE_BYTES, follow_links=False)
        if not data:
            raise ValueError("is empty")
    return data


def write_whole(path: StrPath, data: bytes) -> Path:
    """Make `path` hold `data`, in one step and durably; its folder is made. Raises SaveError."""
    final = Path(path)
    try:
        make_directory_durable(final.parent)
        with new_file(final) as (fd, _), open(fd, "wb", closefd=False) as file:
            file.write(data)
    except (OSError, ValueError) as error:
        raise SaveError(f"{path}: cannot be written: {getattr(error, 'strerror', error)}", path=path) from error
    return final


@contextmanager
def named_errors(source: StrPath, kind: str) -> Iterator[None]:
    """Turn every OSError and ValueError inside into a UsageError that names the file `source` of this `kind`."""
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{kind} {source}: there is no such file") from None
    except OSError as error:
        raise UsageError(f"{kind} {source} cannot be read ({error.strerror})") from error
    except RecursionError:
        raise UsageError(f"{kind} {source} is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{kind} {source} {error}") from None
