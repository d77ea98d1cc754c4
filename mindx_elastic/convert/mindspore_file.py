"""Plain safetensors files, name -> tensor, as MindSpore and most other programs write them.

Reads one file; the files of a folder that make up one model (`indexed`); or ``rank_{r}/*.safetensors``, which it
assembles by a strategy. A rank folder usually holds the files of several steps,
``{prefix}-{epoch}_{step}.safetensors``: one step is chosen for all ranks. Names are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from mindx_elastic.convert.assemble import assemble
from mindx_elastic.convert.indexed import (
    SHARDING_INFO,
    find_index,
    is_shard,
    numbered_files,
    read_indexed,
)
from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.convert.plain_file import CKPT_REMEDY, PlainFile, is_mindspore_ckpt
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import CorruptCheckpointError, MismatchError, UsageError
from mindx_elastic.persist.catalog import rank_of_folder
from mindx_elastic.persist.packed import flat_bytes

if TYPE_CHECKING:
    from mindx_elastic.core.strategy import Strategy, TensorSpec

__all__ = ["read_plain", "read_shards"]

_POSITION = re.compile(r"-(\d{1,9})_(\d{1,12})(?:_breakpoint)?\.safetensors\Z")
_MAX_NAME = 80


def read_plain(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of one file; or of the files of one folder that belong together, or that an index names; and notes
    for people. Raises CorruptCheckpointError, UsageError."""
    index = path if path.suffix == ".json" else find_index(path) if path.is_dir() else None
    if index is not None:
        return read_indexed(index, lambda each: _open_whole(each).tensors())
    if not path.is_dir():
        return _open_whole(path).tensors(), []
    return _read_folder(path)


def _open_whole(path: Path) -> PlainFile:
    file = PlainFile(path)
    if is_shard(file):
        raise UsageError(
            f"{path} holds one rank's parts of the tensors (its {SHARDING_INFO}), which are not put together here: "
            "write them with HuggingFaceStorageWriter(..., enable_consolidation=True), and convert what that makes"
        )
    return file


def _read_folder(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    every = sorted(path.glob("*.safetensors"))
    if not every:
        raise _no_safetensors(path, path)
    for each in path.glob("shard-*.safetensors"):
        _open_whole(each)
    chosen = numbered_files(every) or [each for each in every if each.name == "model.safetensors"] or every
    found = {}
    where: dict[str, Path] = {}
    for each in chosen:
        for name, tensor in _open_whole(each).tensors().items():
            if name in found:
                raise UsageError(
                    f"{name!s:.{_MAX_NAME}} is in {where[name]} and in {each}: these are several "
                    "checkpoints; give one file"
                )
            found[name], where[name] = tensor, each
    if len(chosen) == len(every) > 1 and numbered_files(every) is None:
        return found, [f"no index says that these belong together: {listed([each.name for each in every], 8)}"]
    return found, _left_out(every, chosen)


def _left_out(every: list[Path], chosen: list[Path]) -> list[str]:
    others = [each.name for each in every if each not in chosen]
    return [f"other files, left out: {listed(others, 8)}"] if others else []


def read_shards(
    path: Path, strategy: Strategy, scratch: Scratch, step: int | None = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Whole tensors from ``rank_{r}/*.safetensors`` below `path`; and notes for people.

    step: where a rank has several files the one to take, by the last number of its name; None: the newest that every
    rank folder has. A tensor that `strategy` does not name must be the same in all files. Raises UsageError,
    MismatchError, and CorruptCheckpointError for a part that no sound file holds.
    """
    chosen, notes = _choose(_rank_folders(path, strategy.world_size), step)
    files, damaged = _open_files(chosen)
    held: dict[str, list[int]] = {}
    for rank, file in files.items():
        for name in file.entries:
            held.setdefault(name, []).append(rank)
    found: dict[str, torch.Tensor] = {}

    for name, ranks in held.items():

        def read(rank: int, name: str = name) -> torch.Tensor | None:
            if rank in damaged:
                raise damaged[rank]
            file = files.get(rank)
            return file.tensor(name) if file is not None and name in file.entries else None

        specs = strategy.by_name.get(name, ())
        if not specs:
            found[name] = _same_everywhere(name, ranks, files)
            continue
        wholes = [assemble(name, spec.layout, _whole_shape(spec, files), read, scratch) for spec in specs]
        if any(_digest(other) != _digest(wholes[0]) for other in wholes[1:]):
            raise MismatchError(f"{name}: {len(specs)} different tensors of this name, on different ranks")
        found[name] = wholes[0]
    absent = [spec.name for spec in strategy.tensors if spec.name not in held]
    if absent and damaged:
        raise CorruptCheckpointError(
            f"{absent[0]!s:.{_MAX_NAME}}: in no file; {next(iter(damaged.values()))}", path=path
        )
    shown = ", ".join(absent[:4]) + (" ..." if len(absent) > 4 else "")
    return found, [*notes, *([f"in the strategy and in no file: {shown}"] if absent else [])]


def _rank_folders(path: Path, world_size: int) -> dict[int, list[Path]]:
    """The safetensors files of each rank folder that has any. Raises MismatchError, UsageError."""
    found: dict[int, list[Path]] = {}
    for folder in sorted(path.iterdir()):
        rank = rank_of_folder(folder)
        if rank is None or not folder.is_dir():
            continue
        if rank >= world_size:
            raise MismatchError(f"{folder}: the strategy has only {world_size} ranks", path=folder)
        if names := sorted(folder.glob("*.safetensors")):
            found[rank] = names
    if not found:
        raise _no_safetensors(path, *(folder for folder in path.iterdir() if rank_of_folder(folder) is not None))
    return dict(sorted(found.items()))


def _no_safetensors(path: Path, *folders: Path) -> UsageError:
    ckpt = next((each for folder in folders for each in sorted(folder.glob("*.ckpt")) if is_mindspore_ckpt(each)), None)
    if ckpt is not None:
        return UsageError(f"{ckpt} {CKPT_REMEDY}")
    return UsageError(f"{path}: no {'' if folders == (path,) else 'rank_*/ '}folder holds a safetensors file")


def _choose(folders: Mapping[int, list[Path]], step: int | None) -> tuple[dict[int, Path], list[str]]:
    """One file of each rank, all of one step, and a note where there was a choice. Raises UsageError."""
    if all(len(names) == 1 for names in folders.values()):
        return {rank: names[0] for rank, names in folders.items()}, []
    moments: dict[int, dict[tuple[int, int], Path]] = {}
    for rank, names in folders.items():
        own = moments.setdefault(rank, {})
        for name in names:
            match = _POSITION.search(name.name)
            if match is None:
                problem = f"{name} does not say of which step it is, as in net-3_100.safetensors"
                raise UsageError(
                    f"{name.parent} holds {len(names)} safetensors files and {problem}; leave the one that you want"
                )
            moment = int(match[1]), int(match[2])
            if moment in own:
                raise UsageError(
                    f"{own[moment]} and {name} are both of epoch {moment[0]}, step {moment[1]}; leave the one that you "
                    "want"
                )
            own[moment] = name
    common = sorted(set.intersection(*(set(own) for own in moments.values())))
    wanted = [moment for moment in common if step is None or moment[1] == step]
    shown = ", ".join(f"{epoch}_{number}" for epoch, number in common[-8:]) or "none"
    if not wanted:
        what = "" if step is None else f" with step {step}"
        raise UsageError(f"no moment{what} of which every rank folder has a file; those of all ranks are: {shown}")
    if step is not None and len(wanted) > 1:
        epochs = ", ".join(f"{epoch}_{number}" for epoch, number in wanted[:8])
        raise UsageError(
            f"step {step} is in {len(wanted)} epochs ({epochs}): MindSpore counts steps within an epoch; leave the "
            "files of the epoch that you want"
        )
    chosen = wanted[-1]
    newest = max(moment for own in moments.values() for moment in own)
    missing = [rank for rank, own in moments.items() if newest not in own]
    notes = [f"of {len(common)} moments that all ranks have, {chosen[0]}_{chosen[1]} was taken"]
    if step is None and missing:
        notes.append(f"{newest[0]}_{newest[1]} is newer, but rank {missing[0]} has no file of it")
    return {rank: own[chosen] for rank, own in moments.items()}, notes


def _open_files(chosen: Mapping[int, Path]) -> tuple[dict[int, PlainFile], dict[int, CorruptCheckpointError]]:
    files: dict[int, PlainFile] = {}
    damaged: dict[int, CorruptCheckpointError] = {}
    for rank, path in chosen.items():
        try:
            files[rank] = PlainFile(path)
        except CorruptCheckpointError as error:
            damaged[rank] = error
    if not files:
        raise next(iter(damaged.values()))
    return files, damaged


def _whole_shape(spec: TensorSpec, files: Mapping[int, PlainFile]) -> tuple[int, ...]:
    """Computed from the parts where the strategy does not say it: MindSpore's own files do not say it."""
    if spec.shape:
        return spec.shape
    from mindx_elastic.core.strategy import Strategy
    from mindx_elastic.platforms.mindspore_layout import with_shapes

    entries = {rank: files[rank].entries.get(spec.name) for rank in spec.layout.ranks if rank in files}
    shapes = {rank: entry.shape for rank, entry in entries.items() if entry is not None}
    try:
        world_size = max(spec.layout.ranks) + 1
        return with_shapes(Strategy(world_size, (spec,)), {spec.name: shapes}).tensors[0].shape
    except UsageError as error:
        raise MismatchError(f"{error}: the files and the strategy do not belong together") from None


def _same_everywhere(name: str, ranks: list[int], files: Mapping[int, PlainFile]) -> torch.Tensor:
    first = files[ranks[0]].tensor(name)
    digest = _digest(first)
    for rank in ranks[1:]:
        other = files[rank].tensor(name)
        if other.shape != first.shape or other.dtype != first.dtype or _digest(other) != digest:
            raise MismatchError(
                f"{name}: differs between rank {ranks[0]} and rank {rank}, and the strategy does not say "
                "how it is laid out"
            )
    return first


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128(flat_bytes(tensor).numpy().data if tensor.numel() else b"").hexdigest()
