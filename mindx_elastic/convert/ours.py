"""Our own checkpoint files as a source.

The inventory chooses the step: the newest one all of whose tensors are there. It is then put together from
the files of all its ranks: tensors that are the same everywhere come from the lowest rank, sharded ones from the parts
(``mindx.layout`` in the headers), components are merged (pipeline stages).

The reading is not that of a start on one rank (`start.reshard`). A start verifies whole files and does without a
damaged one; here every tensor that is used is checked by itself and taken from another holder where it is damaged, so
that what is sound in a damaged file can still be rescued, and nothing else is read. A start refuses what it cannot go
on from exactly, such as weights that ranks keep equal by themselves, or another rank's own components; those can be
converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.convert.assemble import assemble, first_healthy
from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.convert.rank_file import RankFile, agree
from mindx_elastic.convert.state import MODEL
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.core.strategy import TensorSpec
from mindx_elastic.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    MismatchError,
    NoUsableCheckpointError,
    UsageError,
)
from mindx_elastic.persist.flatten import Tree, tensor_names
from mindx_elastic.persist.format import CheckpointInfo, read_header
from mindx_elastic.persist.unflatten import unflatten
from mindx_elastic.start.findings import list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory, SavedStep

__all__ = ["OurStep", "find_step", "read_step"]

_OF_EACH_RANK = {*RESERVED_NAMES, "loader", "train", "callbacks"}
"""Components that differ between ranks by their nature; the lowest rank's is taken."""
_FEW_RANKS = 1 << 12
_OF_OTHERS = (
    "what another program has written is not converted: torch.load(FILE, weights_only=True) or "
    "safetensors.torch.load_file(FILE) loads its weights (docs/porting.md)"
)


@dataclass
class OurStep:
    """The files of one moment, by rank; of one rank the one to try first in front."""

    info: CheckpointInfo
    files: dict[int, list[RankFile]]
    note: str = ""
    """For people: what is doubtful about the choice."""


def find_step(path: Path, step: int | None) -> OurStep:
    """What to convert: a file, or of a directory the newest step all of whose tensors are there, or `step`.

    Raises NoUsableCheckpointError when there is nothing, CorruptCheckpointError when nothing can be used,
    ForeignCheckpointError for another program's file, UsageError for one rank's file of a sharded job.
    """
    if not path.is_dir():
        try:
            file = RankFile(path, read_header(path))
        except (CorruptCheckpointError, ForeignCheckpointError) as error:
            raise type(error)(f"{error}; {_OF_OTHERS}", path=path) from None
        info = file.header.info
        if any(spec.layout.num_shards > 1 for spec in file.specs.values()):
            raise UsageError(
                f"{path} is rank {info.rank}'s part of {info.world_size}: give the directory that holds all ranks, and "
                f"--step {info.step}"
            )
        if file.header.held is not None and len(file.header.held.parts) < file.header.held.division.count:
            raise UsageError(
                f"{path} is one of the files among which {info.world_size} ranks have divided their state: give the "
                f"directory that holds all of them, and --step {info.step}"
            )
        if step is not None and step != info.step:
            raise UsageError(f"{path} is of step {info.step}, not {step}")
        alone = any(spec.layout.size < info.world_size for spec in file.specs.values())
        note = f"what rank {info.rank} holds; the other ranks of {info.world_size} may hold more" if alone else ""
        return OurStep(info, {info.rank: [file]}, note)
    inventory = Inventory.merge([scan(list_files([path]), trust=reader_trust(path))])
    there = inventory.steps
    steps = [each for each in there if step in (None, each.moment[2])]
    if not steps:
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        numbers = sorted({each.moment[2] for each in there})
        shown = f"; steps found: {', '.join(map(str, numbers[-8:]))}" if numbers else ""
        bad = [f"{one.path}: {one.problem}" for one in inventory.entries.values() if one.problem and one.looks_ours]
        shown += f"; cannot be used: {'; '.join(bad[:4])}" if bad else ""
        kind = CorruptCheckpointError if bad and not there else NoUsableCheckpointError
        shown += "" if there else f"; {_OF_OTHERS}"
        raise kind(f"no {wanted} found in {path}{shown}", path=path)
    chosen = next((each for each in steps if each.is_complete or _is_whole(each)), steps[0])
    first = chosen.entries[0].header
    assert first is not None  # the entries of a step have good ones
    return OurStep(first.info, _files_of(chosen), _doubt(chosen, steps))


def _is_whole(step: SavedStep) -> bool:
    """Whether every part of every tensor is in some file, so that only what is a rank's own may be missing."""
    if step.world_size > 16 * max(len(step.ranks), _FEW_RANKS):
        return False  # said by a few small files: what they would cost the planner follows what they say
    return step.is_usable


def _files_of(step: SavedStep) -> dict[int, list[RankFile]]:
    found: dict[int, list[RankFile]] = {}
    for entry in step.entries:
        if entry.header is not None and entry.header.info.world_size == step.world_size:
            found.setdefault(entry.header.info.rank, []).append(RankFile(entry.path, entry.header))
    return found


def _doubt(chosen: SavedStep, steps: Sequence[SavedStep]) -> str:
    run_id, _, number = chosen.moment
    notes = [] if chosen.is_complete else [f"step {number} is not complete: {chosen.why_incomplete}"]
    same = [each for each in steps if each.moment[2] == number]
    if len(same) > 1:
        notes.append(f"{len(same)} runs or attempts have a step {number}; run {run_id} is taken")
    return "; ".join(notes)


def read_step(step: OurStep, component: str, everything: bool, scratch: Scratch) -> dict[str, Any]:
    """The components, the model under `MODEL`; `everything`: all of them.

    Raises UsageError for a component that is not there, CorruptCheckpointError for a tensor, or a part of one, that no
    file holds sound, MismatchError where files of the ranks do not fit together.
    """
    return _Step(step, scratch).read(component, everything)


class _Step:
    def __init__(self, step: OurStep, scratch: Scratch) -> None:
        self.files, self.scratch = step.files, scratch
        self.whole: dict[tuple[object, ...], torch.Tensor] = {}
        self.owner: dict[str, tuple[TensorSpec | None, int]] = {}
        """Name -> what it is, and the rank that it was first seen on."""

    def read(self, component: str, everything: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        first: RankFile | None = None
        for rank, files in sorted(self.files.items()):
            file = files[0]
            tree = _wanted(file, component, everything)
            names = tensor_names(tree)
            self._check_numbers(first, file, everything)
            if self._adds_nothing(rank, file, names) and first is not None:
                continue
            first = first or file
            tensors = {name: self._tensor(name) for name in names}
            sharded = {name for name in names if name in file.specs}
            found = unflatten(_without_strides(tree, sharded), tensors, path=file.path)
            state = found if not state else _merged(state, found)
        model = state.get(component)
        if not isinstance(model, Mapping):
            path = first.path if first else "it"
            raise UsageError(f"{path} has no component {component!r}; there are {', '.join(_names(first)) or 'none'}")
        return {MODEL: model, **{name: item for name, item in state.items() if name not in (component, MODEL)}}

    def _adds_nothing(self, rank: int, file: RankFile, names: list[str]) -> bool:
        """Whether everything in this rank's file is known from lower ranks."""
        new = False
        for name in names:
            spec = file.specs.get(name)
            known = self.owner.get(name)
            if known is None:
                self.owner[name] = (spec, rank)
                new = True
                continue
            other, owner = known
            if self._belong_together(name, file, spec, other, owner):
                continue
            raise MismatchError(
                f"{name}: rank {owner} and rank {rank} hold different tensors of this name, and their files do not say "
                "how they belong together (pipeline stages that all count from 0, or weights of each rank's own). "
                "Convert one rank's file, or leave out --all",
                path=file.path,
            )
        return not new

    def _belong_together(
        self, name: str, file: RankFile, spec: TensorSpec | None, other: TensorSpec | None, owner: int
    ) -> bool:
        same = self._digest(owner, name) == file.header.digests.get(name, "")
        if name.partition(".")[0] in _OF_EACH_RANK:
            return True
        if not agree(spec, other):  # such as weights that ranks keep equal by themselves
            return same and all(one is None or one.layout.num_shards == 1 for one in (spec, other))
        info = file.header.info
        return spec is not None or same or info.coordinates.get("replicas") == info.world_size

    def _digest(self, rank: int, name: str) -> str:
        return self.files[rank][0].header.digests.get(name, "")

    def _check_numbers(self, first: RankFile | None, file: RankFile, everything: bool) -> None:
        """State of an optimizer is numbered; only equal numbers can be merged."""
        if first is None or not everything:
            return
        ours, theirs = (f.header.layout.get("parameters") for f in (first, file))
        if ours != theirs:
            raise MismatchError(
                f"{first.path} and {file.path} number the parameters of their optimizers differently (pipeline "
                "stages, ZeRO): convert without --all"
            )

    def _tensor(self, name: str) -> torch.Tensor:
        spec, rank = self.owner[name]
        key: tuple[object, ...] = spec.key if spec is not None else (name,)
        if key not in self.whole:
            self.whole[key] = self._read(name, rank, spec)
        return self.whole[key]

    def _read(self, name: str, rank: int, spec: TensorSpec | None) -> torch.Tensor:
        if spec is None:
            digest = self._digest(rank, name)
            same = [r for r in self.files if digest == self._digest(r, name)] if digest else []
            ranks = list(dict.fromkeys([rank, *sorted(same)]))
            return first_healthy(name, ranks, lambda r: self._first(r, lambda file: self._whole(file, name)))

        self._check_assumed(name, rank, spec)

        def part(holder: int) -> torch.Tensor | None:
            return self._first(holder, lambda file: self._whole(file, file.name_of(spec)))

        return assemble(name, spec.layout, spec.shape, part, self.scratch)

    def _whole(self, file: RankFile, name: str | None) -> torch.Tensor | None:
        """A tensor of a file, put together from the files of all ranks where they have divided it."""
        divided = None if name is None else file.divided(name)
        if name is None or divided is None:
            return None if name is None else file.tensor(name)
        everybody = [file, *(each for files in self.files.values() for each in files if each is not file)]
        whole: torch.Tensor | None = None
        for piece in divided.pieces:
            rows = _first_sound([partial(each.rows_of, name, piece, file) for each in everybody])
            if rows is None:
                return None
            if len(divided.pieces) == 1:
                return rows
            whole = self.scratch.empty(divided.shape, rows.dtype) if whole is None else whole
            whole[piece.start : piece.stop] = rows
        return whole

    def _check_assumed(self, name: str, rank: int, spec: TensorSpec) -> None:
        """That ranks are equal may be no more than likely (see `capture.layouts`): their digests tell.

        Buffers may differ, as the statistics of a BatchNorm do: the lowest rank's are taken.
        """
        file = self.files[rank][0]
        if name.partition(".")[0] in _OF_EACH_RANK or file.is_volatile(name) or not file.is_assumed(name):
            return
        for holders in spec.layout.holders:
            found: dict[str, int] = {}
            for holder in holders:
                for other in self.files.get(holder, ())[:1]:
                    found.setdefault(other.digest_of(spec), holder)
            found.pop("", None)
            if len(found) > 1:
                one, other_rank = list(found.values())[:2]
                raise MismatchError(
                    f"{name}: rank {one} and rank {other_rank} hold different tensors of this name, which were taken "
                    "to be equal; describe its layout where it was saved, or convert one rank's file",
                    path=file.path,
                )

    def _first(self, rank: int, read: Any) -> torch.Tensor | None:
        """Read it from the first of the rank's files that has it sound."""
        return _first_sound([partial(read, file) for file in self.files.get(rank, ())])


def _first_sound(reads: Sequence[Callable[[], torch.Tensor | None]]) -> torch.Tensor | None:
    """What the first of `reads` gives that gives something and meets no damage. Raises CorruptCheckpointError where
    nothing but damage was found."""
    problem: CorruptCheckpointError | None = None
    for read in reads:
        try:
            found = read()
        except CorruptCheckpointError as error:
            problem = problem or error
        else:
            if found is not None:
                return found
    if problem is not None:
        raise problem
    return None


def _names(file: RankFile | None) -> list[str]:
    tree = None if file is None else file.header.tree
    return [str(name)[:60] for name in tree] if isinstance(tree, dict) else []


def _wanted(file: RankFile, component: str, everything: bool) -> dict[str, Tree]:
    tree = file.header.tree
    if not isinstance(tree, dict) or any(key.startswith("$") for key in tree):
        raise UsageError(f"{file.path} holds no components by name; it was not written by a training job")
    return tree if everything else {key: node for key, node in tree.items() if key == component}


def _without_strides(node: Tree, names: set[str]) -> Tree:
    """A part's strides say nothing about the whole."""
    if isinstance(node, list):
        return [_without_strides(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$tensor"), str) and node["$tensor"] in names:
        return {key: item for key, item in node.items() if key != "strides"}
    return {key: _without_strides(item, names) for key, item in node.items()}


def _merged(one: Any, other: Any) -> Any:
    """Entries of both; where both have one, that of the lower rank."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one
    result = one.copy()
    for key, value in other.items():
        result[key] = _merged(one[key], value) if key in one else value
    return result
