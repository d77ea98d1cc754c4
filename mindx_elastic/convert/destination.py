"""Where a conversion goes: written under another name in the same folder, then renamed. Nothing is lost unasked."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindx_elastic.convert.dcp import METADATA
from mindx_elastic.errors import SaveError, UsageError
from mindx_elastic.persist.storage import TEMP_SUFFIX, fsync_dir, publish

__all__ = ["check_destination", "new_file", "new_folder"]


def check_destination(path: Path, *, source: Path, folder: bool, force: bool) -> None:
    """Raises UsageError where `path` may not be written."""
    if not path.name or path.name in (".", ".."):
        raise UsageError(f"{path}: give the name of what is to be made")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder; make it first")
    with contextlib.suppress(OSError):
        if path.exists() and os.path.samefile(path, source):
            raise UsageError(f"{path} is the source")
    if not os.path.lexists(path):
        return
    is_folder = path.is_dir() and not path.is_symlink()
    if folder and not is_folder:
        raise UsageError(f"{path} is a file; a DCP checkpoint is a folder")
    if not folder and is_folder:
        raise UsageError(f"{path} is a folder; give the name of a file")
    if folder and os.listdir(path) and not (path / METADATA).is_file():
        raise UsageError(f"{path} is a folder with other things than a DCP checkpoint; it is never replaced")
    if not force and not (folder and not os.listdir(path)):
        raise UsageError(f"{path} exists; give --force to replace it")


def _temp(path: Path) -> Path:
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}{TEMP_SUFFIX}")


@contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """A name to write to; it becomes `path` when the block ends well, and is deleted when not. Raises SaveError."""
    temp = _temp(path)
    try:
        yield temp
        fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if force:
            publish(temp, path)
        else:
            _publish_new(temp, path)
        fsync_dir(path.parent)
    except (OSError, RuntimeError) as error:
        raise _save_error(path, error) from error
    finally:
        temp.unlink(missing_ok=True)


def _publish_new(temp: Path, path: Path) -> None:
    """Somebody may have made `path` since it was looked at."""
    try:
        os.link(temp, path, follow_symlinks=False)
    except FileExistsError:
        raise UsageError(f"{path} has appeared meanwhile; nothing was overwritten") from None
    except OSError:  # no hard links there
        publish(temp, path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """As `new_file`; a folder that was there is replaced at the end and deleted."""
    temp, old = _temp(path), _temp(path)
    try:
        os.mkdir(temp)
        yield temp
        fsync_dir(temp)
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(temp, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
        fsync_dir(path.parent)
    except (OSError, RuntimeError) as error:
        raise _save_error(path, error) from error
    finally:
        for left in (temp, old):
            shutil.rmtree(left, ignore_errors=True)


def _save_error(path: Path, error: Exception) -> Exception:
    if isinstance(error, SaveError | UsageError):
        return error
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return SaveError(f"{path}: cannot be written: {text}; what was there before is untouched", path=path)
