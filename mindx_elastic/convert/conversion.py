"""Converts one checkpoint of this package into a file that other programs read.

The destination is written under another name in the same folder, then renamed: it appears whole or not at all, and
without ``--force`` nothing is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mindx_elastic.convert.ours import read_source
from mindx_elastic.convert.state import MODEL, flat_tensors, num_tensors, plain_values
from mindx_elastic.errors import SaveError, UnsupportedStateError, UsageError
from mindx_elastic.persist.storage import fsync_dir, publish, temp_name

__all__ = ["ConversionRequest", "Converted", "convert"]

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
        tensors, others = flat_tensors(model)
        if others:
            notes.append(f"left out, no tensors: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''}")
        with _new_file(request) as temp:
            _write_plain(temp, tensors)
        return Converted(*num_tensors(tensors), step, notes)
    content = plain_values({**state, MODEL: model} if request.everything else model)
    with _new_file(request) as temp:
        torch.save(content, temp)
    return Converted(*num_tensors(content), step, notes)


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
    """A name to write to; it becomes the destination when the block ends well, and is deleted when not. Raises
    SaveError, and UsageError where a file has appeared there."""
    path = request.destination
    temp = temp_name(path)
    try:
        yield temp
        fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        (publish if request.force else _publish_new)(temp, path)
        fsync_dir(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise SaveError(f"{path}: cannot be written: {text}; what was there before is untouched", path=path) from error
    finally:
        temp.unlink(missing_ok=True)


def _publish_new(temp: Path, path: Path) -> None:
    """Another process may have made `path` since the check."""
    try:
        os.link(temp, path, follow_symlinks=False)
    except FileExistsError:
        raise UsageError(f"{path} has appeared meanwhile; nothing was overwritten") from None
    except OSError:  # no hard links there
        publish(temp, path)
