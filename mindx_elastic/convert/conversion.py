"""Converts one checkpoint of this package into a file that other programs read.

The destination is written under another name in the same folder, then renamed: it appears whole or not at all, and
without ``--force`` nothing is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mindx_elastic.capture.copying import tensors_in
from mindx_elastic.convert.ours import read_source
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import SaveError, UnsupportedStateError, UsageError
from mindx_elastic.persist.storage import new_file

__all__ = ["ConversionRequest", "Converted", "convert"]

_KINDS = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".safetensors": "safetensors"}
"""The format by the destination's suffix."""


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """The arguments of one conversion. Raises UsageError for wrong ones."""

    source: Path
    destination: Path
    component: str = "model"
    """Name of the model where the source holds several components."""
    step: int | None = None
    """None: the newest."""
    force: bool = False

    def __post_init__(self) -> None:
        if self.destination.suffix not in _KINDS:
            raise UsageError(f"{self.destination}: give a name that ends in {', '.join(_KINDS)}: it says the format")
        if self.step is not None and self.step < 0:
            raise UsageError(f"step {self.step}: numbers count from 0")

    @property
    def kind(self) -> str:
        """``torch`` or ``safetensors``."""
        return _KINDS[self.destination.suffix]


@dataclass
class Converted:
    """What a conversion did."""

    num_tensors: int
    nbytes: int
    """Size of the tensors."""
    step: int
    notes: list[str] = field(default_factory=list)
    """Lines to print: what was left out or is doubtful."""


def convert(request: ConversionRequest) -> Converted:
    """Convert a checkpoint.

    Raises UsageError, UnsupportedStateError or a CheckpointError; the destination is untouched then.
    """
    _check_destination(request)
    step, model, notes = read_source(request.source, request.component, step=request.step)
    if request.kind == "safetensors":
        tensors, others = _flat_tensors(model)
        if others:
            notes.append(f"left out, no tensors: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''}")
        with _new_file(request) as temp:
            _write_plain(temp, tensors)
        return _converted(tensors.values(), step, notes)
    with _new_file(request) as temp:
        torch.save(model, temp)
        if unread := torch.serialization.get_unsafe_globals_in_checkpoint(temp):
            problem = f"torch.load(weights_only=True) reads no {listed(sorted(unread), 3)}"
            raise UnsupportedStateError(request.component, problem)
    return _converted([tensor for _, tensor in tensors_in(model)], step, notes)


def _converted(tensors: Collection[torch.Tensor], step: int, notes: list[str]) -> Converted:
    return Converted(len(tensors), sum(tensor.nbytes for tensor in tensors), step, notes)


def _write_plain(temp: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tied ones are written for each of their names."""
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if name == "__metadata__" or tensor.layout is not torch.strided or tensor.is_complex():
            what = f"{tensor.layout} tensor of {tensor.dtype}"
            raise UnsupportedStateError(name, f"a plain safetensors file cannot hold this {what}; write a .pt file")
        whole = tensor.detach().contiguous()
        plain[name] = whole.clone() if whole.data_ptr() in seen else whole
        seen.add(whole.data_ptr())
    save_file(plain, temp, metadata={"format": "pt"})


def _check_destination(request: ConversionRequest) -> None:
    """Raises UsageError where it may not be written."""
    path = request.destination
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder; make it first")
    if path.exists() and path.samefile(request.source):
        raise UsageError(f"{path} is the source")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file")
    if os.path.lexists(path) and not request.force:
        raise UsageError(f"{path} exists; give --force to replace it")


@contextmanager
def _new_file(request: ConversionRequest) -> Iterator[Path]:
    """A file to write to; it becomes the destination when the block ends well, and is deleted when not. Raises
    SaveError, and UsageError where a file has appeared there."""
    path = request.destination
    try:
        with new_file(path) as (_, temp):
            yield temp
            with temp.open("rb") as written:  # safetensors puts another file in the place of the one that it is given
                os.fsync(written.fileno())  # which may take long: look again only then
            _check_destination(request)
    except (OSError, RuntimeError, SafetensorError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise SaveError(f"{path}: cannot be written: {text}; what was there before is untouched", path=path) from error


def _flat_tensors(model: Mapping[Any, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Every tensor of `model` by its dotted name, and the names of other values.

    Raises UsageError where two tensors would have one name.
    """
    found: dict[str, torch.Tensor] = {}
    others: list[str] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if name in found:
                raise UsageError(f"two tensors would be called {name}")
            found[name] = value
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | Mapping) for item in value):
            for index, item in enumerate(value):
                walk(item, f"{name}.{index}")
        else:
            others.append(name)

    walk(model, "")
    return found, [name for name in others if name]
