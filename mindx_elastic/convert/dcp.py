"""Directories of ``torch.distributed.checkpoint``, written by any number of ranks.

``.metadata`` gives the size of each tensor, and of each of its chunks the offset in the tensor and the file; every
chunk, and every value other than a tensor, is a separate ``torch.save``. The metadata is a pickle and is read by
`inert_pickle`, the rest with ``weights_only=True``: no code of such a directory is ever run. Written with torch's own
writer.
"""

from __future__ import annotations

import inspect
import io
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.convert.assemble import Size, TensorPart, check_parts, put_together
from mindx_elastic.convert.inert_pickle import PickledObject, read_inert
from mindx_elastic.convert.mapped import Scratch, open_source
from mindx_elastic.convert.state import LazyValue
from mindx_elastic.convert.torch_file import load_weights
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, ForeignCheckpointError
from mindx_elastic.persist.dtypes import parse_dtype

__all__ = ["METADATA", "read_dcp", "write_dcp"]

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_MAX_DIMS = 64
_MAX_LIST = 1_000_000


@dataclass(frozen=True)
class _Place:
    """The file and the bytes of one chunk, or of one value."""

    file: str
    offset: int
    length: int


def read_dcp(path: Path, scratch: Scratch) -> dict[str, Any]:
    """The nested state, with a `LazyValue` for every leaf. Raises CorruptCheckpointError, ForeignCheckpointError."""
    file = path / METADATA
    try:
        with open(open_source(file), "rb") as stream:
            data = stream.read(_MAX_METADATA_BYTES + 1)
        if len(data) > _MAX_METADATA_BYTES:
            raise ValueError(f"more than {_MAX_METADATA_BYTES:,} bytes")
        return _Reader(path, scratch).read(data)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(f"{file}: no metadata of a DCP checkpoint: {error}", path=file) from error


class _Reader:
    def __init__(self, path: Path, scratch: Scratch) -> None:
        self.path, self.scratch = path, scratch

    def read(self, data: bytes) -> dict[str, Any]:
        record = _fields(read_inert(data), "Metadata")
        places = self._places(_table(record.get("storage_data")))
        planner_data = record.get("planner_data")
        paths = planner_data if type(planner_data) is dict else {}
        state: dict[str, Any] = {}
        for name, entry in _table(record.get("state_dict_metadata")).items():
            if type(name) is not str:
                raise ValueError("a key that is not a string")
            kind = type(entry).__name__
            if kind == "TensorStorageMetadata":
                leaf = self._tensor(name, _fields(entry, kind), places.get(name, {}))
            elif kind == "BytesStorageMetadata":
                leaf = self._value(name, places.get(name, {}))
            else:
                raise ValueError(f"{name!s:.80} is described by a {kind!s:.80}")
            _put(state, _path_of(name, paths.get(name)), leaf)
        return _optimizer_numbers(state)

    def _places(self, table: dict[Any, Any]) -> dict[str, dict[Size | None, _Place]]:
        found: dict[str, dict[Size | None, _Place]] = {}
        for key, value in table.items():
            index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
            name, file = index.get("fqn"), info.get("relative_path")
            if type(name) is not str or type(file) is not str:
                raise ValueError("storage data without a name")
            if file in ("", ".", "..") or "/" in file or "\0" in file:
                raise ValueError(f"{name!s:.80} is in {file!s:.80}, which is outside of the directory")
            if info.get("transform_descriptors"):
                raise ForeignCheckpointError(
                    f"{self.path}: {name!s:.80} is packed or encrypted; save without extensions"
                )
            offset = index.get("offset")
            place = _Place(file, _number(info.get("offset")), _number(info.get("length")))
            found.setdefault(name, {})[None if offset is None else _size(offset)] = place
        return found

    def _tensor(self, name: str, fields: dict[Any, Any], places: Mapping[Size | None, _Place]) -> LazyValue:
        shape = _size(fields.get("size"))
        state = _made(fields.get("properties"), "TensorProperties").state
        dtype = state[0] if type(state) is tuple and state else None
        if not isinstance(dtype, type) or dtype.__module__ != "torch":
            raise ValueError(f"{name!s:.80} without a type")
        kind = parse_dtype(dtype.__name__)
        if type(fields.get("chunks")) is not list:
            raise ValueError(f"{name!s:.80} without chunks")
        parts = [self._part(name, chunk, kind, places) for chunk in fields["chunks"]]
        check_parts(name, shape, parts)
        return LazyValue(lambda: put_together(shape, kind, parts, self.scratch))

    def _part(self, name: str, value: Any, dtype: torch.dtype, places: Mapping[Size | None, _Place]) -> TensorPart:
        fields = _fields(value, "ChunkStorageMetadata")
        offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
        place = places.get(offsets)
        if place is None:
            raise ValueError(f"{name!s:.80}: its chunk at {list(offsets)} is in no file")
        if math.prod(sizes) * dtype.itemsize > place.length:
            raise ValueError(f"{name!s:.80}: {place.length} bytes for a chunk of {list(sizes)}")
        return TensorPart(offsets, sizes, lambda: self._chunk(name, place, sizes, dtype))

    def _chunk(self, name: str, place: _Place, sizes: Size, dtype: torch.dtype) -> torch.Tensor:
        part = self._load(name, place)
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
            found = f"{part.dtype} {list(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
            problem = f"{self.path}: {name}: {found} instead of {dtype} {list(sizes)}"
            raise CorruptCheckpointError(problem, path=self.path, tensor=name)
        if part.layout is not torch.strided or part.is_quantized:
            raise ForeignCheckpointError(f"{self.path}: {name} is not a plain dense tensor", path=self.path)
        return part.detach()

    def _value(self, name: str, places: Mapping[Size | None, _Place]) -> LazyValue:
        if len(places) != 1:
            raise ValueError(f"{name!s:.80} is in {len(places)} places")
        (place,) = places.values()
        return LazyValue(lambda: self._load(name, place))

    def _load(self, name: str, place: _Place) -> Any:
        path = self.path / place.file
        with open(open_source(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if place.offset + place.length > size:
                problem = f"{path}: {name} should end at byte {place.offset + place.length}, the file has {size}"
                raise CorruptCheckpointError(problem, path=path, tensor=name)
            file.seek(place.offset)
            data = file.read(place.length)
        return load_weights(io.BytesIO(data), f"{path}: {name}", path)


def _path_of(name: str, found: Any) -> tuple[str | int, ...]:
    if found is None:
        return (name,)
    if type(found) is not tuple or not found or type(found[0]) is not str or len(found) > _MAX_DIMS:
        raise ValueError(f"{name!s:.80}: a malformed path in the state")
    if all(type(key) is str or (type(key) is int and 0 <= key < _MAX_LIST) for key in found):
        return found
    raise ValueError(f"{name!s:.80}: a malformed path in the state")


def _put(state: dict[str, Any], path: tuple[str | int, ...], leaf: LazyValue) -> None:
    """As in DCP: a text is a key of a dictionary, a number a place in a list."""
    at: Any = state
    for key, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(key, int):
            if not isinstance(at, list) or key > len(at):
                raise ValueError(f"{path!s:.200}: a list with gaps")
            if key == len(at):
                at.append(None)
        elif not isinstance(at, dict):
            raise ValueError(f"{path!s:.200}: two values in one place")
        present = at[key] if isinstance(key, int) else at.get(key)
        if following is None:
            if present is not None:
                raise ValueError(f"{path!s:.200}: two values in one place")
            at[key] = leaf
        elif present is None:
            at[key] = [] if isinstance(following, int) else {}
        at = at[key]


def _optimizer_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """DCP makes texts of all keys; an optimizer's state is keyed by the numbers of its parameters."""
    for value in [state, *state.values()]:
        if isinstance(value, dict) and isinstance(value.get("state"), dict) and "param_groups" in value:
            numbered = value["state"]
            if all(type(key) is str and key.isascii() and key.isdecimal() for key in numbered):
                value["state"] = {int(key): item for key, item in numbered.items()}
    return state


def _made(value: Any, name: str) -> PickledObject:
    if not isinstance(value, PickledObject) or type(value).__name__ != name:
        raise ValueError(f"a {type(value).__name__!s:.80} where a {name} should be")
    return value


def _fields(value: Any, name: str) -> dict[Any, Any]:
    """The attributes of an instance of the class `name`, by their names."""
    return _table(_made(value, name).state)


def _table(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError("a table is missing")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.80} where a number of bytes should be")
    return value


def _size(value: Any) -> Size:
    """``torch.Size((2, 3))``."""
    arguments = _made(value, "Size").arguments
    if len(arguments) == 1 and type(arguments[0]) is tuple and len(arguments[0]) <= _MAX_DIMS:
        return tuple(_number(n) for n in arguments[0])
    raise ValueError("a size is missing")


def write_dcp(temp: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to the folder `temp`; torch's writer flushes every file. The caller renames."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process; that is intended
        alone = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}  # torch 2.6 sees it itself
        save(dict(state), storage_writer=FileSystemWriter(temp), **alone)
