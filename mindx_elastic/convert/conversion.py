"""Converts one checkpoint of this package into a file that other programs read.

The destination is written under another name in the same folder, then renamed: it appears whole or not at all, and
without ``--force`` nothing is replaced.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mindx_elastic.convert.ours import read_source
from mindx_elastic.errors import SaveError, UnsupportedStateError, UsageError
from mindx_elastic.persist.storage import new_file

__all__ = ["ConversionRequest", "Converted", "convert"]

MODEL = "model"
_KINDS = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".safetensors": "safetensors"}
"""The format by the destination's suffix."""


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """The arguments of one conversion. Raises UsageError for wrong ones."""

    source: Path
    destination: Path
    component: str = MODEL
    """Name of the model where the source holds several components."""
    everything: bool = False
    """Keep the optimizer and the rest."""
    step: int | None = None
    """None: the newest."""
    force: bool = False

    def __post_init__(self) -> None:
        if self.destination.suffix not in _KINDS:
            raise UsageError(f"{self.destination}: give a name that ends in {', '.join(_KINDS)}: it says the format")
        if self.kind == "safetensors" and self.everything:
            raise UsageError("a plain safetensors file holds named tensors only: leave out --all, or write a .pt file")
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
    step, state, notes = read_source(
        request.source, request.component, everything=request.everything, step=request.step
    )
    model = state.pop(request.component)
    if request.kind == "safetensors":
        tensors, others = _flat_tensors(model)
        if others:
            notes.append(f"left out, no tensors: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''}")
        with _new_file(request) as temp:
            _write_plain(temp, tensors)
        return Converted(*_num_tensors(tensors), step, notes)
    content = _plain_values({**state, MODEL: model} if request.everything else model)
    with _new_file(request) as temp:
        torch.save(content, temp)
    return Converted(*_num_tensors(content), step, notes)


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
            _check_destination(request)
    except (OSError, RuntimeError, SafetensorError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise SaveError(f"{path}: cannot be written: {text}; what was there before is untouched", path=path) from error


# --- the state in the forms that other programs read ---


def _plain_values(value: Any, where: str = "state") -> Any:
    """`value` of types that ``torch.load(weights_only=True)`` reads: arrays become tensors, their scalars numbers.

    Raises UnsupportedStateError for a value that has no such form.
    """

    def inner(item: Any, key: object) -> Any:
        return _plain_values(item, f"{where}.{key}"[:300])

    if isinstance(value, Counter):
        return Counter(dict(value))
    if isinstance(value, OrderedDict):
        ordered = OrderedDict((key, inner(item, key)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # a module's version numbers
            ordered._metadata = value._metadata  # type: ignore[attr-defined]
        return ordered
    if isinstance(value, dict):
        return {key: inner(item, key) for key, item in value.items()}
    if isinstance(value, list | deque):
        return [inner(item, index) for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(inner(item, index) for index, item in enumerate(value))
    if isinstance(value, frozenset):
        return set(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.array(value, order="C"))
        except TypeError:
            return value.tolist()
    if type(value) in _KNOWN or value is None:
        return value
    raise UnsupportedStateError(where, f"a value of type {type(value).__qualname__} has no form there")


_KNOWN = (
    *(bool, int, float, complex, str, bytes, set, torch.Tensor, torch.nn.Parameter),
    *(torch.Size, torch.dtype, torch.device),
)


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


def _num_tensors(value: Any) -> tuple[int, int]:
    """How many tensors, and their bytes."""
    if isinstance(value, torch.Tensor):
        return 1, value.numel() * value.element_size()
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    found = [_num_tensors(each) for each in inner]
    return sum(count for count, _ in found), sum(nbytes for _, nbytes in found)
