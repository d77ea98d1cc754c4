"""Reads a checkpoint file into nested state, and checks every byte against its digest. It never runs code.

Each tensor has its own memory, so that one that outlives the rest does not keep the whole file in memory, and that
one that is resized has no neighbours. A few threads each read and hash large ones: preadv and xxh3 release the GIL.
Small ones are read by the caller's thread meanwhile, many at once: each costs more in Python than in the kernel.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from mindx_elastic.core.division import RowPiece, piece_name
from mindx_elastic.core.layout import Box
from mindx_elastic.core.owners import Owners
from mindx_elastic.core.tensor_memory import memory_of, without_collections
from mindx_elastic.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    StrPath,
    UntrustedFileError,
    UsageError,
)
from mindx_elastic.persist.dtypes import BY_NAME
from mindx_elastic.persist.entries import TensorEntry
from mindx_elastic.persist.flatten import Tree, tensor_names, unflatten
from mindx_elastic.persist.format import CheckpointInfo, Header, open_checkpoint

__all__ = ["Checkpoint", "Pieces", "map_checkpoint", "read_checked", "read_checkpoint", "read_some", "verify_file"]

_NUM_THREADS = 4
_PIECE_BYTES = 8 << 20  # read, then hashed
_LARGE_BYTES = 64 << 10
_RUN_BYTES = 1 << 20
_READ_BYTES = 8 << 20


@dataclass
class Checkpoint:
    """One file's content."""

    info: CheckpointInfo
    state: Any
    """As it was given to `write_checkpoint`; all tensors on the CPU."""
    layout: dict[str, Any]


def read_checkpoint(path: StrPath, *, owners: Owners | None = None, others: Sequence[StrPath] = ()) -> Checkpoint:
    """Read `path` whole. Any thread; blocks on the disk.

    `owners`: the users whose files are trusted. `others`: files of the same step with what `path` lacks, where
    replicas have divided their state.

    Raises CorruptCheckpointError (`path` and `tensor` name what is damaged), ForeignCheckpointError,
    UntrustedFileError, or an OSError when a file cannot be opened; MismatchError for one of `others` of another step,
    UsageError where parts are in none of the files.
    """
    path = Path(path)
    with without_collections(), open_checkpoint(path, owners) as (fd, header):
        tensors: dict[str, torch.Tensor] = {}
        pieces = Pieces(header, path)

        def load(entry: TensorEntry) -> None:
            place = pieces.place_of(entry)
            tensor = _read_tensor(fd, header, entry, path, out=place)
            if place is None:
                tensors[entry.name] = tensor

        def load_run(run: Sequence[TensorEntry]) -> None:
            data = _read_run(fd, header, run, path).view(run[0].torch_dtype)
            split: Any = torch.split_with_sizes_copy  # torch's own stub says that it returns nothing
            counts = [entry.nbytes // data.itemsize for entry in run]
            for entry, tensor in zip(run, split(data, counts), strict=True):
                tensors[entry.name] = tensor if len(entry.shape) == 1 else tensor.view(entry.shape)

        _for_each(header.entries.values(), load, load_run if header.held is None else None)
    for other in map(Path, others):
        pieces.add(other, owners)
    tensors |= pieces.whole()
    return Checkpoint(header.info, unflatten(header.tree, tensors, path=path), header.layout)


class Pieces:
    """The tensors of a divided state, put together from several files. Nothing where a file holds all of its state."""

    def __init__(self, header: Header, path: Path) -> None:
        """`header`: of the file to begin with, at `path`."""
        self._header, self._path, held = header, path, header.held
        self._division = None if held is None else held.division
        self._tensors: dict[str, torch.Tensor] = {}
        self._own: dict[str, tuple[str, RowPiece]] = {}
        self._missing: dict[tuple[str, int], RowPiece] = {}
        if held is None:
            return
        for name, tensor in held.division.tensors.items():
            self._tensors[name] = torch.empty(tensor.shape, dtype=BY_NAME[tensor.dtype], device="cpu")
            self._missing |= {(name, piece.part): piece for piece in tensor.pieces if piece.part not in held.parts}
        self._own = {name: (whole, piece) for name, whole, piece in held.division.pieces(held.parts)}

    def place_of(self, entry: TensorEntry) -> torch.Tensor | None:
        """Where the first file's piece belongs; None: it is not a piece."""
        found = self._own.get(entry.name)
        return None if found is None else self._rows(*found)

    def _rows(self, name: str, piece: RowPiece) -> torch.Tensor:
        return self._tensors[name][piece.start : piece.stop]

    def add(self, path: Path, owners: Owners | None) -> None:
        """Take what is still missing from another file. Raises as `read_checkpoint`."""
        with open_checkpoint(path, owners) as (fd, header):
            if header.info.moment != self._header.info.moment:
                raise MismatchError(f"{path} is of another step by now", path=path)
            wanted: dict[str, list[tuple[str, RowPiece]]] = {}
            for (name, part), piece in list(self._missing.items()):
                entry = self._entry_with(header, name, piece)
                if entry is not None:
                    wanted.setdefault(entry.name, []).append((name, piece))
                    del self._missing[name, part]

            def load(entry: TensorEntry) -> None:
                pieces = wanted[entry.name]
                if header.held is not None:
                    ((name, piece),) = pieces
                    _read_tensor(fd, header, entry, path, out=self._rows(name, piece))
                    return
                whole = _read_tensor(fd, header, entry, path)
                for name, piece in pieces:
                    self._rows(name, piece).copy_(whole[piece.start : piece.stop])

            _for_each([header.entries[name] for name in wanted], load)

    def _entry_with(self, header: Header, name: str, piece: RowPiece) -> TensorEntry | None:
        assert self._division is not None
        tensor, held = self._division.tensors[name], header.held
        if held is None:  # a whole file, of a rank that has saved alone
            entry = header.entries.get(name)
            return entry if entry is not None and (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape) else None
        assert self._header.held is not None
        if held.key != self._header.held.key or piece.part not in held.parts:
            return None
        return header.entries[piece_name(name, tensor, piece)]

    def whole(self) -> dict[str, torch.Tensor]:
        """Raises UsageError where pieces are missing."""
        if self._missing and self._division is not None:
            lacking = sorted({part + 1 for _, part in self._missing})
            raise UsageError(
                f"{self._path} is one of the files among which replicas have divided a state of {self._division.count} "
                f"parts, and part {', '.join(map(str, lacking))} is not in it: give the files of the other ranks too, "
                "or put them together with `mindx-elastic convert`"
            )
        return self._tensors


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
        dtype, shape = entry.torch_dtype, entry.shape
        if not entry.nbytes:
            tensors[entry.name] = torch.empty(shape, dtype=dtype, device="cpu")
            continue
        flat = torch.frombuffer(
            data, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=header.data_start + entry.start
        )
        tensors[entry.name] = flat if len(shape) == 1 else flat.reshape(shape)
    return Checkpoint(header.info, unflatten(header.tree, tensors, path=path), header.layout)


def read_some(fd: int, header: Header, tree: Tree, path: Path) -> Any:
    """The part of a checkpoint's state that `tree`, a part of the header's tree, describes; digests are checked.

    Raises CorruptCheckpointError, also for tensors that the file has only pieces of.
    """
    names = set(tensor_names(tree))
    wanted = [entry for name, entry in header.entries.items() if name in names]
    tensors = {entry.name: _read_tensor(fd, header, entry, path) for entry in wanted}
    return unflatten(tree, tensors, path=path)


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
                    read_checked(fd, header, entry, path)
                except CheckpointError as error:
                    problems.append(str(error))

            def check_run(run: Sequence[TensorEntry]) -> None:
                try:
                    _read_run(fd, header, run, path)
                except CheckpointError:  # there may be several
                    for entry in run:
                        check(entry)

            _for_each(header.entries.values(), check, check_run)
    except UntrustedFileError:
        raise
    except CheckpointError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror or error}")
    return sorted(problems)


def _for_each(
    entries: Collection[TensorEntry],
    work: Callable[[TensorEntry], None],
    work_run: Callable[[Sequence[TensorEntry]], None] | None = None,
) -> None:
    """Call `work` for each, or `work_run` for small ones together; the first error is raised after all have ended."""
    large = [entry for entry in entries if entry.nbytes >= _LARGE_BYTES]
    small = [entry for entry in entries if entry.nbytes < _LARGE_BYTES]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mindx-persist-read") as pool:
        done = pool.map(work, large)  # which makes no thread where there is none
        for run in _runs(small):
            if work_run is not None:
                work_run(run)
                continue
            for entry in run:
                work(entry)
        for _ in done:
            pass


def _runs(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Tensors of one type that are next to each other in the file, together."""
    run: list[TensorEntry] = []
    for entry in entries:
        if run and (entry.dtype != run[0].dtype or entry.start != run[-1].end or entry.end - run[0].start > _RUN_BYTES):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _read_run(fd: int, header: Header, run: Sequence[TensorEntry], path: Path) -> torch.Tensor:
    """The bytes of tensors that are next to each other."""
    start, digests = run[0].start, header.digests
    data = torch.empty(run[-1].end - start, dtype=torch.uint8, device="cpu")
    view = memory_of(data)
    try:
        _read_into(fd, view, header.data_start + start, run[0], path)
    except CorruptCheckpointError:
        for entry in run:  # one of them cannot be read: which?
            _read_into(fd, view[entry.start - start : entry.end - start], header.data_start + entry.start, entry, path)
    for name, _, _, begin, end in run:
        if xxhash.xxh3_128_hexdigest(view[begin - start : end - start]) != digests[name]:
            raise _differs(path, name)
    return data


def _read_tensor(
    fd: int, header: Header, entry: TensorEntry, path: Path, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`out`: contiguous memory of that type and shape."""
    tensor = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu") if out is None else out
    for _ in _pieces(fd, header, entry, path, _PIECE_BYTES, memory=memory_of(tensor)):
        pass
    return tensor


def _pieces(
    fd: int,
    header: Header,
    entry: TensorEntry,
    path: Path,
    step: int,
    *,
    memory: memoryview | None = None,
) -> Iterator[memoryview]:
    """Read one tensor, `step` bytes at a time, and check its digest in the end. `memory`: of all of it; None: each
    piece takes the place of the one before."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(step, entry.nbytes))) if memory is None else memory
    for start in range(0, entry.nbytes, step):
        first = 0 if memory is None else start
        piece = buffer[first : first + min(step, entry.nbytes - start)]
        _read_into(fd, piece, header.data_start + entry.start + start, entry, path)
        digest.update(piece)
        yield piece
    if digest.hexdigest() != header.digests[entry.name]:
        raise _differs(path, entry.name)


def read_checked(
    fd: int, header: Header, entry: TensorEntry, path: Path, wanted: Sequence[tuple[Box, torch.Tensor]] = ()
) -> None:
    """Read all of one tensor, check its digest, and fill each tensor of `wanted` (any strides) with its box on the way.

    Takes memory for one piece, or one row, besides. Raises CorruptCheckpointError; then `wanted` is worth nothing. Any
    thread.
    """
    whole = next((out for _, out in wanted if out.shape == entry.shape and out.is_contiguous()), None)
    if whole is not None:
        _read_tensor(fd, header, entry, path, out=whole)
        for box, out in wanted:
            if out is not whole:
                out.copy_(whole[tuple(slice(*each) for each in box)])
        return
    row_bytes = max(1, entry.nbytes // entry.shape[0]) if wanted and entry.shape else 1
    num_rows = max(1, _PIECE_BYTES // row_bytes)
    first = 0
    for piece in _pieces(fd, header, entry, path, num_rows * row_bytes):
        stop = first + len(piece) // row_bytes
        for box, out in wanted:
            start, end = max(first, box[0][0]), min(stop, box[0][1])
            if start < end:
                rows = torch.frombuffer(piece, dtype=entry.torch_dtype).view(stop - first, *entry.shape[1:])
                inner = tuple(slice(*each) for each in box[1:])
                out[start - box[0][0] : end - box[0][0]].copy_(rows[(slice(start - first, end - first), *inner)])
        first = stop


def _differs(path: Path, name: str) -> CorruptCheckpointError:
    problem = f"{path}: tensor {name} does not match its digest; the file is damaged"
    return CorruptCheckpointError(problem, path=path, tensor=name)


def _read_into(fd: int, view: memoryview, offset: int, entry: TensorEntry, path: Path) -> None:
    """Fill `view` with bytes of tensor `entry`. Raises CorruptCheckpointError when bytes are missing or the medium
    fails."""
    while view:
        try:
            count = os.preadv(fd, [view[:_READ_BYTES]], offset)
        except OSError as error:  # the medium fails: report a damaged file
            problem = f"{path}: tensor {entry.name} cannot be read: {error.strerror}"
            raise CorruptCheckpointError(problem, path=path, tensor=entry.name) from error
        if count == 0:
            problem = f"{path}: tensor {entry.name} is cut off; the file was truncated while it was read"
            raise CorruptCheckpointError(problem, path=path, tensor=entry.name)
        view, offset = view[count:], offset + count
