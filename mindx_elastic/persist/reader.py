"""Reads a checkpoint file into nested state, and checks every byte against its digest. It never runs code.

Each tensor has memory of its own, so that one that outlives the rest does not keep the whole file in memory, and that
one that is resized has no neighbours. Large ones are read straight into it; small ones of one type that follow each
other are read together and then copied apart. A few threads each read and hash their own tensors: preadv and xxh3
release the GIL. Very small ones are read by the caller's thread alone: they take more time in Python than in the
kernel, and several threads take twice the CPU time for it, waiting for each other's GIL.
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

from mindx_elastic.core.division import Piece, piece_name
from mindx_elastic.core.owners import Owners
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
from mindx_elastic.persist.flatten import Tree
from mindx_elastic.persist.format import CheckpointInfo, Header, open_checkpoint
from mindx_elastic.persist.unflatten import unflatten

__all__ = ["Checkpoint", "Pieces", "map_checkpoint", "read_checkpoint", "read_some", "verify_file"]

_NUM_THREADS = 4
_PIECE_BYTES = 8 << 20  # read, then hashed
_BATCH_BYTES = 8 << 20  # small tensors are handed to a thread together
_RUN_BYTES = 256 << 10  # and read together: they are hashed and copied while they are in the CPU's cache
_SMALL_BYTES = 64 << 10
_TINY_BYTES = 16 << 10  # runs of smaller tensors than this on average are read by one thread


_Run = list[TensorEntry]
"""One tensor, or small ones of one type of which each follows the other."""


@dataclass
class Checkpoint:
    """One file's content."""

    info: CheckpointInfo
    state: Any
    """As it was given to `write_checkpoint`; all tensors on the CPU."""
    layout: dict[str, Any]


def read_checkpoint(
    path: StrPath, *, verify: bool = True, owners: Owners | None = None, others: Sequence[StrPath] = ()
) -> Checkpoint:
    """Read `path` whole. Any thread; blocks on the disk.

    verify=False skips the digests of the tensors, for a file that was verified a moment ago; the header is always
    checked. `owners`: the users whose files are trusted. `others`: files of the same step with what `path` lacks, where
    replicas have divided their state.

    Raises CorruptCheckpointError (`path` and `tensor` name what is damaged), ForeignCheckpointError,
    UntrustedFileError, or an OSError when a file cannot be opened; MismatchError for one of `others` of another step,
    UsageError where parts are in none of the files.
    """
    path = Path(path)
    with open_checkpoint(path, owners) as (fd, header):
        tensors: dict[str, torch.Tensor] = {}
        pieces = Pieces(header, path)

        def load(run: _Run) -> None:
            place = pieces.place_of(run[0])
            if place is None:
                tensors.update(_read_run(fd, header, run, path, verify=verify))
            else:
                _read_tensor(fd, header, run[0], path, verify=verify, out=place)

        _for_each(_runs(header.entries.values(), alone=pieces.names), load)
    for other in map(Path, others):
        pieces.add(other, owners, verify=verify)
    tensors |= pieces.whole()
    return Checkpoint(header.info, unflatten(header.tree, tensors, path=path), header.layout)


class Pieces:
    """The tensors of a divided state, put together from several files. Nothing where a file holds all of its state."""

    def __init__(self, header: Header, path: Path) -> None:
        """`header`: of the file to begin with, at `path`."""
        self._header, self._path, held = header, path, header.held
        self._division = None if held is None else held.division
        self._tensors: dict[str, torch.Tensor] = {}
        self._own: dict[str, tuple[str, Piece]] = {}
        self._missing: dict[tuple[str, int], Piece] = {}
        if held is None:
            return
        for name, tensor in held.division.tensors.items():
            self._tensors[name] = torch.empty(tensor.shape, dtype=BY_NAME[tensor.dtype], device="cpu")
            self._missing |= {(name, piece.part): piece for piece in tensor.pieces if piece.part not in held.parts}
        self._own = {name: (whole, piece) for name, whole, piece in held.division.pieces(held.parts)}

    @property
    def names(self) -> Collection[str]:
        """Of the first file's tensors that are pieces."""
        return self._own

    def place_of(self, entry: TensorEntry) -> torch.Tensor | None:
        """Where the first file's piece belongs; None: it is no piece."""
        found = self._own.get(entry.name)
        return None if found is None else self._rows(*found)

    def _rows(self, name: str, piece: Piece) -> torch.Tensor:
        return self._tensors[name][piece.start : piece.stop]

    def add(self, path: Path, owners: Owners | None, *, verify: bool) -> None:
        """Take what is still missing from another file. Raises as `read_checkpoint`."""
        with open_checkpoint(path, owners) as (fd, header):
            if header.info.moment != self._header.info.moment:
                raise MismatchError(f"{path} is of another step by now", path=path)
            wanted: dict[str, list[tuple[str, Piece]]] = {}
            for (name, part), piece in list(self._missing.items()):
                entry = self._entry_with(header, name, piece)
                if entry is not None:
                    wanted.setdefault(entry.name, []).append((name, piece))
                    del self._missing[name, part]

            def load(run: _Run) -> None:
                entry = run[0]
                pieces = wanted[entry.name]
                if header.held is not None:
                    ((name, piece),) = pieces
                    _read_tensor(fd, header, entry, path, verify=verify, out=self._rows(name, piece))
                    return
                whole = _read_tensor(fd, header, entry, path, verify=verify)
                for name, piece in pieces:
                    self._rows(name, piece).copy_(whole[piece.start : piece.stop])

            _for_each(([header.entries[name]] for name in wanted), load)

    def _entry_with(self, header: Header, name: str, piece: Piece) -> TensorEntry | None:
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
    names = set(_names(tree))
    tensors: dict[str, torch.Tensor] = {}
    for run in _runs(entry for name, entry in header.entries.items() if name in names):
        tensors.update(_read_run(fd, header, run, path, verify=True))
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


def verify_file(
    path: StrPath, owners: Owners | None = None, *, on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """Every problem of `path`, one line each; empty when it is good. Bad content or a missing file raises nothing.

    `owners`: the users whose files are trusted. `on_bytes`: told in any thread how many more have been read. Raises
    UntrustedFileError for a file of another user.
    """
    path = Path(path)
    problems: list[str] = []
    try:
        with open_checkpoint(path, owners) as (fd, header):

            def check(run: _Run) -> None:
                problems.extend(_problems_of(fd, header, run, path))
                if on_bytes is not None:
                    on_bytes(sum(end - start for _, _, _, start, end in run))

            _for_each(_runs(header.entries.values()), check)
    except UntrustedFileError:
        raise
    except CheckpointError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror or error}")
    return sorted(problems)


def _runs(entries: Iterable[TensorEntry], *, alone: Collection[str] = ()) -> Iterator[_Run]:
    """`entries`, in file order. `alone`: the names of those that are runs by themselves."""
    run: _Run = []
    dtype, begin, position = "", 0, -1
    for entry in entries:
        name, own_dtype, _, start, end = entry
        if alone and name in alone:
            if run:
                yield run
            yield [entry]
            run = []
            continue
        if run and (start != position or own_dtype != dtype or end - begin > _RUN_BYTES or end - start > _SMALL_BYTES):
            yield run
            run = []
        if not run:
            dtype, begin = own_dtype, start
        run.append(entry)
        position = end
    if run:
        yield run


def _for_each(runs: Iterable[_Run], work: Callable[[_Run], None]) -> None:
    """Call `work` for all runs, in file order within a batch; the first error is raised after all have ended."""
    large: list[_Run] = []
    tiny: list[_Run] = []
    for run in runs:
        (tiny if run[-1].end - run[0].start < _TINY_BYTES * len(run) and len(run) > 1 else large).append(run)
    batches = list(_batches(large))
    if len(batches) <= 1:
        for run in [*batches[0], *tiny] if batches else tiny:
            work(run)
        return

    def work_batch(batch: list[_Run]) -> None:
        for run in batch:
            work(run)

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mindx-persist-read") as pool:
        done = pool.map(work_batch, batches)
        work_batch(tiny)
        for _ in done:
            pass


def _batches(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    batch: list[_Run] = []
    size = 0
    for run in runs:
        batch.append(run)
        size += run[-1].end - run[0].start
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_run(fd: int, header: Header, run: _Run, path: Path, *, verify: bool) -> dict[str, torch.Tensor]:
    """The tensors of a run by name. Raises CorruptCheckpointError."""
    if len(run) > 1:
        # Flat: views of one buffer would share their storage, which a program may resize or save for itself.
        data = torch.empty(run[-1].end - run[0].start, dtype=torch.uint8, device="cpu")
        if _fill_run(fd, header, run, data, path):
            if verify and (damaged := _damaged(header, run, data)):
                raise _mismatch(damaged[0], path)
            return _apart(run, data.view(run[0].torch_dtype))
    return {entry.name: _read_tensor(fd, header, entry, path, verify=verify) for entry in run}


def _apart(run: _Run, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a run by name, each a copy. `data`: all of their elements."""
    split: Any = torch.split_with_sizes_copy  # torch's own stub says that it returns nothing
    shape = run[0].shape
    inner = shape[1:]
    if shape and all(inner) and {entry[2][1:] if entry[2] else None for entry in run} == {inner}:
        # Cut along their first dimension: a view of each would take longer than the cutting.
        rows: Sequence[torch.Tensor] = split(data.view(-1, *inner), [entry[2][0] for entry in run])
        return {entry[0]: tensor for entry, tensor in zip(run, rows, strict=True)}
    item = data.element_size()
    flat: Sequence[torch.Tensor] = split(data, [(end - start) // item for _, _, _, start, end in run])
    return {
        entry[0]: tensor if len(entry[2]) == 1 else tensor.view(entry[2])
        for entry, tensor in zip(run, flat, strict=True)
    }


def _problems_of(fd: int, header: Header, run: _Run, path: Path) -> list[str]:
    """One line for each tensor of a run that is damaged or cannot be read."""
    if len(run) > 1:
        data = torch.empty(run[-1].end - run[0].start, dtype=torch.uint8, device="cpu")
        if _fill_run(fd, header, run, data, path):
            return [str(_mismatch(entry, path)) for entry in _damaged(header, run, data)]
    problems = []
    for entry in run:
        try:
            _check_tensor(fd, header, entry, path)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _fill_run(fd: int, header: Header, run: _Run, data: torch.Tensor, path: Path) -> bool:
    """False: some of it cannot be read. Then read each tensor by itself, so that the error names the right one."""
    if not data.numel():
        return True
    try:
        _read_into(fd, data.numpy().data, header.data_start + run[0].start, run[0], path)
    except CorruptCheckpointError:
        return False
    return True


def _damaged(header: Header, run: _Run, data: torch.Tensor) -> list[TensorEntry]:
    view, begin, digests = data.numpy().data, run[0].start, header.digests
    digest = xxhash.xxh3_128_hexdigest
    return [entry for entry in run if digest(view[entry[3] - begin : entry[4] - begin]) != digests[entry[0]]]


def _read_tensor(
    fd: int, header: Header, entry: TensorEntry, path: Path, *, verify: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`out`: contiguous memory of that type and shape."""
    tensor = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu") if out is None else out
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
        raise _mismatch(entry, path)


def _mismatch(entry: TensorEntry, path: Path) -> CorruptCheckpointError:
    problem = f"{path}: tensor {entry.name} does not match its digest; the file is damaged"
    return CorruptCheckpointError(problem, path=path, tensor=entry.name)


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
