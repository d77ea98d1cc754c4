"""Reads a checkpoint file into nested state, and checks every byte against its digest. It never runs code.

Each tensor is read into memory of its own, so that one that outlives the rest does not keep the whole file in memory.
A few threads each read and hash their own tensors: preadv and xxh3 release the GIL.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from mindx_elastic.core.owners import Owners
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, StrPath, UntrustedFileError
from mindx_elastic.persist.flatten import Tree
from mindx_elastic.persist.format import CheckpointInfo, Header, TensorEntry, open_checkpoint, unflatten

__all__ = ["Checkpoint", "map_checkpoint", "read_checkpoint", "read_some", "verify_file"]

_NUM_THREADS = 4
_PIECE_BYTES = 8 << 20  # read, then hashed
_BATCH_BYTES = 8 << 20  # small tensors are handed to a thread together


@dataclass
class Checkpoint:
    """One file's content."""

    info: CheckpointInfo
    state: Any
    """As it was given to `write_checkpoint`; all tensors on the CPU."""
    layout: dict[str, Any]


def read_checkpoint(path: StrPath, *, verify: bool = True, owners: Owners | None = None) -> Checkpoint:
    """Read `path` whole. Any thread; blocks on the disk.

    verify=False skips the digests of the tensors, for a file that was verified a moment ago; the header is always
    checked. `owners`: the users whose files are trusted. Raises CorruptCheckpointError (`tensor` names the damaged
    one), ForeignCheckpointError, UntrustedFileError, or an OSError when the file cannot be opened.
    """
    path = Path(path)
    with open_checkpoint(path, owners) as (fd, header):
        tensors: dict[str, torch.Tensor] = {}

        def load(entry: TensorEntry) -> None:
            tensors[entry.name] = _read_tensor(fd, header, entry, path, verify=verify)

        _for_each(header.entries.values(), load)
    return Checkpoint(header.info, unflatten(header.tree, tensors, path=path), header.layout)


def map_checkpoint(path: StrPath, *, owners: Owners | None = None) -> Checkpoint:
    """The content of a snapshot in memory of which the record (`memory.arena`) says that all its bytes are there.

    Nothing is copied, and no digest is checked: the process that it belongs to may be filling them in at this moment.
    The tensors are views of the file. Writing to them does not reach it, but they change when that process writes
    again. Raises as `read_checkpoint`. Any thread.
    """
    path = Path(path)
    with open_checkpoint(path, owners, sealed=False) as (fd, header):
        data = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    tensors = {}
    for entry in header.entries.values():
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        if entry.nbytes:
            flat = torch.frombuffer(
                data, dtype=entry.torch_dtype, count=tensor.numel(), offset=header.data_start + entry.start
            )
            tensor = flat.reshape(entry.shape)
        tensors[entry.name] = tensor
    return Checkpoint(header.info, unflatten(header.tree, tensors, path=path), header.layout)


def read_some(fd: int, header: Header, tree: Tree, path: Path) -> Any:
    """The part of a checkpoint's state that `tree`, a part of the header's tree, describes; digests are checked.

    Raises CorruptCheckpointError.
    """
    names = set(_names(tree))
    tensors = {n: _read_tensor(fd, header, e, path, verify=True) for n, e in header.entries.items() if n in names}
    return unflatten(tree, tensors, path=path)


def _names(tree: Tree) -> Iterator[str]:
    """The names of the tensors that a tree refers to."""
    if isinstance(tree, list):
        for item in tree:
            yield from _names(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            if key in ("$tensor", "$ndarray", "$blob") and isinstance(item, str):
                yield item
            else:
                yield from _names(item)


def verify_file(path: StrPath, owners: Owners | None = None) -> list[str]:
    """Every problem of `path`, one line each; empty when it is good. Bad content or a missing file raises nothing.

    `owners`: the users whose files are trusted. Raises UntrustedFileError for a file of another user.
    """
    path = Path(path)
    problems: list[str] = []
    try:
        with open_checkpoint(path, owners) as (fd, header):

            def check(entry: TensorEntry) -> None:
                try:
                    _check_tensor(fd, header, entry, path)
                except CheckpointError as error:
                    problems.append(str(error))

            _for_each(header.entries.values(), check)
    except UntrustedFileError:
        raise
    except CheckpointError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror or error}")
    return sorted(problems)


def _for_each(entries: Iterable[TensorEntry], work: Callable[[TensorEntry], None]) -> None:
    """Call `work` for all entries, in file order within a batch; the first error is raised after all have ended."""
    batches = list(_batches(entries))
    if len(batches) <= 1:
        for entry in batches[0] if batches else ():
            work(entry)
        return

    def work_batch(batch: list[TensorEntry]) -> None:
        for entry in batch:
            work(entry)

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mindx-persist-read") as pool:
        for _ in pool.map(work_batch, batches):
            pass


def _batches(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    batch: list[TensorEntry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += entry.nbytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_tensor(fd: int, header: Header, entry: TensorEntry, path: Path, *, verify: bool) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
    digest = xxhash.xxh3_128()
    if entry.nbytes:
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        offset = header.data_start + entry.start
        for start in range(0, entry.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            _read_into(fd, piece, offset + start, entry, path)
            if verify:
                digest.update(piece)
    if verify:
        _compare(digest, header, entry, path)
    return tensor


def _check_tensor(fd: int, header: Header, entry: TensorEntry, path: Path) -> None:
    """Check one tensor's digest, with memory for one piece only."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(entry.nbytes, _PIECE_BYTES)))
    for start in range(0, entry.nbytes, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, entry.nbytes - start)]
        _read_into(fd, piece, header.data_start + entry.start + start, entry, path)
        digest.update(piece)
    _compare(digest, header, entry, path)


def _compare(digest: Any, header: Header, entry: TensorEntry, path: Path) -> None:
    if digest.hexdigest() != header.digests[entry.name]:
        problem = f"{path}: tensor {entry.name} does not match its digest; the file is damaged"
        raise CorruptCheckpointError(problem, path=path, tensor=entry.name)


def _read_into(fd: int, view: memoryview, offset: int, entry: TensorEntry, path: Path) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:  # the medium fails: report a damaged file
            problem = f"{path}: tensor {entry.name} cannot be read: {error.strerror}"
            raise CorruptCheckpointError(problem, path=path, tensor=entry.name) from error
        if count == 0:
            problem = f"{path}: tensor {entry.name} is cut off; the file was truncated while it was read"
            raise CorruptCheckpointError(problem, path=path, tensor=entry.name)
        done += count
