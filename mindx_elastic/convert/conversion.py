"""Converts one checkpoint from one format into another.

The destination is written under another name in the same folder, then renamed: it appears whole or not at all, and
without ``--force`` nothing is replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.convert import dcp, indexed, mindspore_file, ours, plain_file, torch_file
from mindx_elastic.convert.kinds import KINDS, SOURCES, find_kind, kind_of_name, refuse_deepspeed
from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.convert.state import MODEL, components_of, flat_tensors, num_tensors, plain_values
from mindx_elastic.errors import SaveError, UsageError
from mindx_elastic.persist.storage import fsync_dir, publish, temp_name

__all__ = ["ConversionRequest", "Converted", "convert"]


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """The arguments of one conversion. Raises UsageError for wrong ones."""

    source: Path
    destination: Path
    source_kind: str | None = None
    """None: found by content."""
    destination_kind: str | None = None
    """None: by the destination's name."""
    component: str | None = None
    """Name of the model where the source holds several components."""
    everything: bool = False
    """Keep the optimizer and the rest."""
    step: int | None = None
    """The step to read, of this package's files."""
    force: bool = False
    on_write: Callable[[Path, int], None] | None = None
    """Told where the writing begins: the temporary file or folder, and the bytes of the tensors that go there."""

    def __post_init__(self) -> None:
        if self.source_kind not in (None, *SOURCES):
            raise UsageError(f"{self.source_kind!r} is not read: leave out --from, or give one of {', '.join(SOURCES)}")
        if self.destination_kind not in (None, *KINDS):
            raise UsageError(f"{self.destination_kind!r} is not written; give one of {', '.join(KINDS)}")
        if self.step is not None and self.step < 0:
            raise UsageError(f"step {self.step}: numbers count from 0")


@dataclass
class Converted:
    """What a conversion did."""

    source_kind: str
    destination_kind: str
    num_tensors: int
    nbytes: int
    """Size of the tensors."""
    step: int | None
    """Of a checkpoint of this package."""
    component: str
    notes: list[str] = field(default_factory=list)
    """Lines to print: what was left out or is doubtful."""


@dataclass
class _Content:
    state: dict[str, Any]
    notes: list[str]
    step: int | None = None
    """For a checkpoint of ours."""


def convert(request: ConversionRequest) -> Converted:
    """Convert a checkpoint.

    Raises UsageError, UnsupportedStateError or a CheckpointError; the destination is untouched then.
    """
    kind = request.source_kind or find_kind(request.source)
    target = request.destination_kind or kind_of_name(request.destination)
    if target == "mindspore" and request.everything:
        raise UsageError(
            "a plain safetensors file holds named tensors only: leave out --all, or convert to torch or dcp"
        )
    if kind != "mindx" and request.step is not None:
        raise UsageError("--step is for checkpoints of this package")
    _check_destination(request.destination, source=request.source, folder=target == "dcp", force=request.force)
    content = _READERS[kind](request)
    result = Converted(kind, target, 0, 0, content.step, request.component or MODEL, content.notes)
    _write(request, target, content, result)
    return result


# --- reading ---


def _read_ours(request: ConversionRequest) -> _Content:
    step = ours.find_step(request.source, request.step)
    scratch = Scratch(request.destination.absolute().parent)
    state = ours.read_step(step, request.component, request.everything, scratch)
    return _Content(state, [step.note] if step.note else [], step.info.step)


def _foreign(request: ConversionRequest, content: Any) -> _Content:
    found = components_of(content, str(request.source), request.component)
    of_optimizer = [str(name) for name in found[MODEL] if str(name).startswith("optimizer.")]
    told = f"{len(of_optimizer)} names begin with `optimizer.`, as in Megatron's folders; they are no weights"
    return _Content(found if request.everything else {MODEL: found[MODEL]}, [told] if of_optimizer else [])


def _read_torch(request: ConversionRequest) -> _Content:
    path = request.source
    refuse_deepspeed(path)
    index = path if path.suffix == ".json" else indexed.find_index(path) if path.is_dir() else None
    if index is not None:
        tensors, notes = indexed.read_indexed(index, torch_file.read_torch_file)
        return _Content({MODEL: tensors}, notes)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a torch.save file, or of an index")
    return _foreign(request, torch_file.read_torch_file(path))


def _read_mindspore(request: ConversionRequest) -> _Content:
    if request.component is not None:
        raise UsageError("--component: a plain safetensors file has no components")
    tensors, notes = mindspore_file.read_plain(request.source)
    return _Content({MODEL: tensors}, notes)


_READERS: dict[str, Callable[[ConversionRequest], _Content]] = {
    "torch": _read_torch,
    "mindspore": _read_mindspore,
    "mindx": _read_ours,
}


# --- writing ---


def _write(request: ConversionRequest, target: str, content: _Content, result: Converted) -> None:
    path, state = request.destination, content.state
    result.num_tensors, result.nbytes = num_tensors(state, str(request.source))
    if target == "mindspore":
        tensors, others = flat_tensors(state[MODEL])
        if others:
            result.notes.append(f"left out, no tensors: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''}")
        result.num_tensors, result.nbytes = num_tensors(tensors)
        with _new_file(path, force=request.force) as temp:
            _tell(request, temp, result)
            result.notes += plain_file.write_plain(temp, tensors)
        return
    plain = plain_values(state if request.everything else state[MODEL], "state" if request.everything else MODEL)
    if target == "torch":
        with _new_file(path, force=request.force) as temp:
            _tell(request, temp, result)
            torch_file.write_torch_file(temp, plain)
        return
    if not isinstance(plain, Mapping):
        raise UsageError(f"{request.source}: the model is not a dictionary; DCP stores nothing else")
    with _new_folder(path) as temp:
        _tell(request, temp, result)
        dcp.write_dcp(temp, plain)


def _tell(request: ConversionRequest, temp: Path, result: Converted) -> None:
    if request.on_write is not None:
        request.on_write(temp, result.nbytes)


# --- the destination ---


def _check_destination(path: Path, *, source: Path, folder: bool, force: bool) -> None:
    """Raises UsageError where `path` may not be written."""
    if not path.name or path.name in (".", ".."):
        raise UsageError(f"{path}: give the name of the file or folder to make")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder; make it first")
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
    if folder and os.listdir(path) and not (path / dcp.METADATA).is_file():
        raise UsageError(f"{path} is a folder with other things than a DCP checkpoint; it is never replaced")
    if not force and not (folder and not os.listdir(path)):
        raise UsageError(f"{path} exists; give --force to replace it")


@contextmanager
def _new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """A name to write to; it becomes `path` when the block ends well, and is deleted when not. Raises SaveError."""
    temp = temp_name(path)
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
    """Another process may have made `path` since the check."""
    try:
        os.link(temp, path, follow_symlinks=False)
    except FileExistsError:
        raise UsageError(f"{path} has appeared meanwhile; nothing was overwritten") from None
    except OSError:  # no hard links there
        publish(temp, path)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """As `_new_file`; a folder that was there is replaced at the end and deleted."""
    temp, old = temp_name(path), temp_name(path)
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
