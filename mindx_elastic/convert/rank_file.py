"""One rank's checkpoint file as a source: its tensors, and what they are parts of."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from mindx_elastic.convert.mapped import MappedFile
from mindx_elastic.core.division import Divided, RowPiece, piece_name
from mindx_elastic.core.strategy import LayoutRecord, TensorSpec
from mindx_elastic.errors import CorruptCheckpointError, MismatchError, UsageError
from mindx_elastic.persist.format import Header
from mindx_elastic.persist.packed import flat_bytes

__all__ = ["RankFile", "agree"]


class RankFile:
    """One rank's file; tensors are mapped and checked when they are asked for."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self.specs = _specs(path, header)
        self._names = {spec.key: name for name, spec in self.specs.items()}
        self._file: MappedFile | None = None

    def tensor(self, name: str) -> torch.Tensor | None:
        """None where the file does not have it, or not all of it. Raises CorruptCheckpointError."""
        entry = self.header.entries.get(name)
        if entry is None:
            return None
        if self._file is None:
            self._file = MappedFile(self.path)
        start = self.header.data_start
        tensor = self._file.tensor(entry.torch_dtype, entry.shape, start + entry.start, start + entry.end)
        data = flat_bytes(tensor).numpy().data if entry.nbytes else b""
        if xxhash.xxh3_128_hexdigest(data) != self.header.digests[name]:
            problem = f"{self.path}: tensor {name} does not match its digest; the file is damaged"
            raise CorruptCheckpointError(problem, path=self.path, tensor=name)
        return tensor

    def digest_of(self, spec: TensorSpec) -> str:
        """The digest of this rank's part of `spec`; empty where it has none."""
        return self.header.digests.get(self._names.get(spec.key, ""), "")

    def is_assumed(self, name: str) -> bool:
        """Whether it is only assumed that the ranks which should hold this tensor hold the same."""
        named, assumed = self.header.layout.get("tensors", {}), self.header.layout.get("assumed", ())
        number = named[name][0] if name in named else self.header.layout.get("default")
        return isinstance(assumed, list) and number in assumed

    def is_volatile(self, name: str) -> bool:
        """Whether it is a buffer of a module."""
        component, _, rest = name.partition(".")
        volatile = self.header.layout.get("volatile")
        names = volatile.get(component) if isinstance(volatile, dict) else None
        return isinstance(names, list) and rest in names

    def name_of(self, spec: TensorSpec) -> str | None:
        """What the file calls this rank's part of `spec`. Raises MismatchError."""
        name = self._names.get(spec.key)
        if name is not None and not agree(self.specs[name], spec):
            raise MismatchError(f"{self.path}: {name} is laid out otherwise than in the other files", path=self.path)
        return name

    def divided(self, name: str) -> Divided | None:
        """The tensor among those that replicas have divided; None: it is not one of them."""
        held = self.header.held
        return None if held is None else held.division.tensors.get(name)

    def rows_of(self, name: str, piece: RowPiece, like: RankFile) -> torch.Tensor | None:
        """The rows of `piece` of the tensor `name` that `like` has divided with its replicas; None: not in this file.
        Raises CorruptCheckpointError."""
        own, theirs = self.header.held, like.header.held
        divided = like.divided(name)
        if divided is None or theirs is None:
            return None
        if own is None:
            whole = self.tensor(name) if self.header.tensor_types.get(name) == (divided.dtype, divided.shape) else None
            return None if whole is None else whole[piece.start : piece.stop]
        if own.key != theirs.key or piece.part not in own.parts:
            return None
        return self.tensor(piece_name(name, divided, piece))


def agree(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    """Whether two files say the same of a tensor."""
    if one is None or other is None:
        return one is other
    return one.key == other.key and one.layout == other.layout and one.shape == other.shape


def _specs(path: Path, header: Header) -> dict[str, TensorSpec]:
    """Entry name -> what it is a part of; entries that the layout record does not speak of are left out."""
    record = {**header.layout, "job": []}  # what other ranks hold is in their files
    if not header.layout:
        return {}
    if record.get("version") != 2:
        raise MismatchError(
            f"{path}: its layout record has version {record.get('version')!r:.20}; convert reads 2", path=path
        )
    named = record.get("tensors", {})
    whole = record.get("default") is not None
    try:
        places = {n: each for n, each in header.tensor_types.items() if whole or n in named}
        parsed = LayoutRecord.from_json(record)
        found = parsed.strategy(places).tensors
        if len(found) == len(places):
            return dict(zip(places, found, strict=True))
        # two entries of one global name: taken one by one
        return {n: spec for n, p in places.items() for spec in parsed.strategy({n: p}).tensors}
    except (UsageError, TypeError) as error:
        raise CorruptCheckpointError(f"{path}: {error}", path=path) from None
