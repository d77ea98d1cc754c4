"""Writes nested state to one durable checkpoint file.

The order of the steps makes a kill at any instant harmless: reserve the space, write the data, then the header (until
then the file begins with zeros and no reader accepts it; a file of one block is written at once), flush, keep the old
file under its second name, rename, flush the directory. Only then is the save reported.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mindx_elastic.core.tensor_memory import without_collections
from mindx_elastic.errors import CheckpointError, SaveError, StrPath, UsageError
from mindx_elastic.persist.direct_io import BlockWriter, Reserve, preallocate
from mindx_elastic.persist.dtypes import NAMES
from mindx_elastic.persist.entries import place_tensors
from mindx_elastic.persist.flatten import Tree, flatten
from mindx_elastic.persist.format import CheckpointInfo, HeaderDraft, Held, read_header, seal_header
from mindx_elastic.persist.storage import (
    check_free_space,
    free_space,
    fsync_dir,
    keep_as,
    make_directory_durable,
    new_file,
    publish,
    publish_copy,
    quarantine,
)

__all__ = ["Flat", "SaveResult", "copied_file", "keep_older", "pieces_of", "previous_path", "write_checkpoint"]

_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of reading the older file that come from this process's limits and not from the file."""


Flat = tuple[Tree, dict[str, torch.Tensor]]
"""A state as `flatten` gives it."""


class SaveResult(NamedTuple):
    """A save that is durable."""

    path: Path
    nbytes: int
    """Size of the file."""
    duration_s: float
    """Time from the call to the flushed directory."""
    info: CheckpointInfo


def write_checkpoint(
    path: StrPath,
    state: object,
    info: CheckpointInfo,
    *,
    layout: Mapping[str, Any] | None = None,
    also: Sequence[StrPath] = (),
    before_publish: Callable[[Path], None] = lambda temp: None,
    reserve: Reserve | None = None,
    held: Held | None = None,
    flat: Flat | None = None,
    cached: bool = False,
) -> SaveResult:
    """Write `state` to `path` and return when it is durable. Blocks; any thread; two calls may run at once.

    state: nested Python values and tensors (see `flatten`), CPU or accelerator. Tensors are read in place and must not
    change meanwhile; work that produces accelerator tensors must be done, or queued on the calling thread's current
    stream. layout: JSON-able description of the shards, stored as it is. also: further names for the same bytes (hard
    links, or copies where links are not possible), each published atomically, once `path` is durable. before_publish:
    called with the finished temporary file just before it gets the name `path`; an OSError there fails the save.
    reserve: memory and a thread for a process that may get no more of either. held: the parts to write of a state that
    replicas divide; None: all of it. flat: what `flatten` gives for `state`, where the caller knows it already.
    cached: write through the page cache, which is faster on some disks (`direct_io`).

    A file of another step, attempt or run that already has one of the names is kept as `previous_path` of it: its step
    may be the only one that all ranks have. Any other file there that is not a checkpoint is moved to quarantine.
    Directories must exist (see `storage.prepare_owned_directory`).

    Raises SaveError (the original error is its ``__cause__``) when the file cannot be written; older files are
    untouched then and the temporary file is deleted. If only a further name fails, `path` exists and the message says
    so. Raises UnsupportedStateError for a value that a checkpoint cannot hold, before anything is written.
    """
    started = time.monotonic()
    path = Path(path)
    if sys.byteorder != "little":
        raise UsageError("the file format is little-endian, this machine is not")
    info = info if info.torch_version else replace(info, torch_version=torch.__version__)
    with without_collections():
        tree, tensors = flatten(state) if flat is None else flat
        if held is not None:
            tensors = pieces_of(tensors, held)
        entries = place_tensors(tensors)
        header = HeaderDraft(entries).header(info, tree, layout or {}, held)
    nbytes = len(header) + (entries[-1].end if entries else 0)
    target, saved = path, None  # the name that is being written; the file, once it is durable

    def name_it(temp: Path, final: Path) -> None:
        keep_older(final, info)
        before_publish(temp)
        publish(temp, final)

    try:
        with new_file(path, name_it) as (fd, _):
            _reserve(fd, path, nbytes)
            pinned = any(map(attrgetter("is_cuda"), tensors.values()))
            with closing(BlockWriter(fd, len(header), pinned=pinned, reserve=reserve, cached=cached)) as blocks:
                digests = blocks.put_tensors((name, tensors[name], end - begin) for name, _, _, begin, end in entries)
                blocks.finish(partial(seal_header, header, digests))
            os.ftruncate(fd, nbytes)  # direct I/O writes whole blocks
        saved = path
        for target in dict.fromkeys(map(Path, also)):
            if target != path:
                keep_older(target, info)
                publish_copy(saved, target)
                fsync_dir(target.parent)
    except (OSError, MemoryError, RuntimeError) as error:
        raise _save_error(error, target, saved, info, nbytes) from error
    return SaveResult(saved, nbytes, time.monotonic() - started, info)


def _reserve(fd: int, path: Path, nbytes: int) -> None:
    """Find out whether the disk has room, before anything is written. Raises OSError."""
    if not preallocate(fd, nbytes):
        check_free_space(path.parent, nbytes)


def pieces_of(tensors: Mapping[str, torch.Tensor], held: Held) -> dict[str, torch.Tensor]:
    """What a file with these parts of `tensors` holds: views of the pieces, and all that is not divided.

    Raises UsageError where the division is not one of these tensors.
    """
    divided = held.division.tensors
    found = {name: tensor for name, tensor in tensors.items() if name not in divided}
    for name, tensor in divided.items():
        own = tensors.get(name)
        if own is None or (NAMES[own.dtype], tuple(own.shape)) != (tensor.dtype, tensor.shape):
            raise UsageError(f"the division that the ranks have agreed on is not of this state: {name}")
    for name, whole, piece in held.division.pieces(held.parts):
        if name in found:
            raise UsageError(f"two tensors of the divided state are called {name}")
        found[name] = tensors[whole][piece.start : piece.stop]
    return found


def previous_path(path: StrPath) -> Path:
    """The second name of an older file: ``a/resnet.safetensors`` -> ``a/resnet.prev.safetensors``."""
    path = Path(path)
    return path.with_name(f"{path.stem}.prev{path.suffix}")


@contextmanager
def copied_file(path: Path, size: int, look: Callable[[Path], CheckpointInfo | None]) -> Iterator[BlockWriter]:
    """For the bytes of a file that is copied here: its space is reserved at once, and after the block it has its name,
    whole and durable, or there is nothing. `look`: is called with the temporary file in the end, and returns its
    header; None: it is no checkpoint, and takes the place of what has its name. Raises OSError."""
    make_directory_durable(path.parent)

    def name_it(temp: Path, final: Path) -> None:
        if (info := look(temp)) is not None:
            keep_older(final, info)
        publish(temp, final)

    with new_file(path, name_it) as (fd, _):
        _reserve(fd, path, size)
        with closing(BlockWriter(fd, 0)) as blocks:
            yield blocks
            blocks.finish()
        os.ftruncate(fd, size)  # direct I/O writes whole blocks


def keep_older(path: Path, info: CheckpointInfo) -> None:
    """Keep the existing file at `path`, which a file with `info` replaces, under a second name (`previous_path`).

    A file of the same moment gets no second name. A file that is not a checkpoint, or that cannot be read (its owner, a
    bad sector), is moved to quarantine. Raises OSError.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        return  # rename() replaces the link itself; its target is not touched
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EEXIST, "a folder or a special file has this name", str(path))
    try:
        old = read_header(path).info
    except FileNotFoundError:
        return
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _OURS:
            raise
        # Quarantine, because as .prev it would replace a good older file.
        in_rank_folder = path.parent.name == f"rank_{info.rank}"
        quarantine(path, str(error), path.parent.parent if in_rank_folder else path.parent)
        return
    if old.moment != info.moment:
        keep_as(path, previous_path(path))


def _save_error(error: BaseException, target: Path, saved: Path | None, info: CheckpointInfo, nbytes: int) -> SaveError:
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    message = f"{target}: cannot save rank {info.rank}, step {info.step} ({nbytes:,} bytes): {text}"
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT):
        message += f"; {_free_text(target.parent)}free some, keep fewer checkpoints or give another directory"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        message += "; check the directory's permissions or give another directory"
    if saved is not None:
        message += f"; the same state is durable in {saved}"
    result = SaveError(message, path=target, rank=info.rank, step=info.step)
    result.errno = code
    return result


def _free_text(directory: Path) -> str:
    try:
        return f"{free_space(directory):,} bytes are free; "
    except OSError:
        return ""
