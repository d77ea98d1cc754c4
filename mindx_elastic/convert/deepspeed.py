"""The weights in a checkpoint folder of DeepSpeed (ZeRO stage 0 to 3), in float32 as its optimizer has them.

``latest`` names the folder of a step, ``global_step{n}``. In it are ``*_model_states.pt`` (the module, and the names
and shapes of the trained parameters) and, of each data-parallel rank, ``*_optim_states.pt`` with its partition of the
parameters in float32:

- stages 1 and 2: each parameter group is one flat vector in the order of ``param_shapes``, cut into equal parts
  (``param_slice_mappings`` says where each parameter is, too, and wrongly so with ``round_robin_gradients``);
- stage 3: each parameter is flat and cut into equal parts, the last one padded; a rank has its parts one after the
  other, in the order of ``param_shapes``.

These files hold objects of DeepSpeed's classes. They are read with ``weights_only=True``, stand-ins in place of all
classes that torch does not know: no code of DeepSpeed or of the file runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.convert.assemble import Size, TensorPart, check_parts, put_together
from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.convert.torch_file import read_torch_file
from mindx_elastic.core.posix import read_small
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, ForeignCheckpointError, UsageError

__all__ = ["deepspeed_folder", "is_rank_file", "read_deepspeed"]

_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{2,7})_model_states\.pt\Z")
_OPTIM_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{2,7})_optim_states\.pt\Z")
_MOST_TAG_BYTES = 4096
_STATES = ("model_states.pt", "optim_states.pt")


def deepspeed_folder(path: Path) -> Path | None:
    """The folder of the step that `path` is, or that its ``latest`` names; None: it is not a folder of DeepSpeed."""
    latest = path / "latest"
    if latest.is_file():
        try:
            tag = read_small(latest, _MOST_TAG_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise CheckpointError(f"{latest}: cannot be read: {error.strerror or error}", path=latest) from error
        if tag and "/" not in tag and tag not in (".", "..") and (path / tag).is_dir():
            path = path / tag
    there = path.is_dir() and any(each.name.endswith(_STATES[0]) for each in path.iterdir())
    return path if there else None


def is_rank_file(path: Path) -> bool:
    """Whether a file is one rank's part: of ZeRO's partitions, or of its stage 3 or a model-parallel job."""
    match = _MODEL_STATES.match(path.name)
    return bool(_OPTIM_STATES.match(path.name)) or (match is not None and (match[1] is not None or int(match[2]) > 0))


def read_deepspeed(path: Path, scratch: Scratch) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The model's tensors by name, and notes for people.

    Floating buffers come in float32 too, frozen parameters as they are stored. Raises UsageError for pipeline, tensor
    and expert parallel jobs, CorruptCheckpointError where a rank's file is missing or damaged.
    """
    folder = deepspeed_folder(path)
    if folder is None:
        raise UsageError(f"{path}: no checkpoint of DeepSpeed: no *_model_states.pt in it, nor in what `latest` names")
    return _Folder(folder, scratch).read()


class _Folder:
    def __init__(self, path: Path, scratch: Scratch) -> None:
        self.path, self.scratch = path, scratch
        names = sorted(each.name for each in path.iterdir())
        models = {match: name for name in names if (match := _MODEL_STATES.match(name))}
        optims = {match: name for name in names if (match := _OPTIM_STATES.match(name))}
        plain = [name for match, name in (models | optims).items() if int(match[2]) == 0]
        odd = [name for name in names if name.endswith(_STATES) and name not in plain]
        if odd or not models:
            raise UsageError(
                f"{path}: {odd[0] if odd else 'no model states'}: pipeline, tensor and expert parallel checkpoints are "
                "not read. Convert with DeepSpeed's own ds_to_universal.py, or save the whole model with it"
            )
        first = min(models, key=lambda match: int(match[1] or 0))
        self.models = {int(match[1] or 0): path / name for match, name in models.items()}
        self.optims = {int(match[1]): path / name for match, name in optims.items()}
        self.states = _contents(path / models[first])
        self.module = _mapping(self.states.get("module"), "module", path)

    def read(self) -> tuple[dict[str, torch.Tensor], list[str]]:
        try:
            shapes = self._shapes(self.states.get("param_shapes"))
            if not shapes:  # stage 0
                return {str(name): value for name, value in self.module.items() if _is_tensor(value)}, []
            return self._with_rest(self._trained(shapes))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            if isinstance(error, UsageError | CorruptCheckpointError | ForeignCheckpointError):
                raise
            raise CorruptCheckpointError(f"{self.path}: no sound DeepSpeed checkpoint: {error!s:.200}") from error

    def _shapes(self, groups: Any) -> dict[str, Size]:
        """The shapes of the parameters of all groups, in their order."""
        return {name: tuple(shape) for group in groups or () for name, shape in group.items()}

    def _trained(self, shapes: Mapping[str, Size]) -> dict[str, torch.Tensor]:
        if not self.optims:
            self._all_of(self.optims, "optim_states.pt", 1)
        counts = _optimizer_state(self.optims[min(self.optims)])["partition_count"]
        count = max(counts) if isinstance(counts, list) else counts
        if max(self.optims) >= count:
            raise CorruptCheckpointError(
                f"{self.path}: {count} ranks have written it, and there is a file of rank {max(self.optims)}: an older "
                "checkpoint is under it. Remove the older files",
                path=self.path,
            )
        states = [_optimizer_state(file) for file in self._all_of(self.optims, "optim_states.pt", count)]
        stage3 = "fp32_flat_groups" in states[0]
        found = self._stage_3(shapes, states) if stage3 else self._stages_1_and_2(states)
        whole: dict[str, torch.Tensor] = {}
        for name, parts in found:
            size = (math.prod(shapes[name]),)
            check_parts(name, size, parts)
            whole[name] = put_together(size, torch.float32, parts, self.scratch).view(shapes[name])
        return whole

    def _all_of(self, files: Mapping[int, Path], what: str, count: int) -> list[Path]:
        """The files of ranks 0 to `count`, exclusive. Raises CorruptCheckpointError where one is missing."""
        missing = list(itertools.islice((rank for rank in range(count) if rank not in files), 8))
        if missing:
            raise CorruptCheckpointError(
                f"{self.path}: the {what} of rank {listed([str(rank) for rank in missing], 7)} of {count} is missing: "
                "its part of the weights is in no other file. Copy it here; of stages 1 and 2, "
                "mp_rank_00_model_states.pt by its name has the weights that the model computes with",
                path=self.path,
            )
        return [files[rank] for rank in range(count)]

    def _stages_1_and_2(self, states: list[Mapping[str, Any]]) -> Iterator[tuple[str, list[TensorPart]]]:
        paddings, align = states[0].get("param_alignment_paddings"), 2 * len(states)
        for number, shapes in enumerate(self.states["param_shapes"]):
            flats = [state["single_partition_of_fp32_groups"][number] for state in states]
            start = 0
            for name, padding in zip(shapes, paddings[number] if paddings else [0] * len(shapes), strict=True):
                length = math.prod(shapes[name])
                yield name, _cut(flats, start, length)
                start += length + padding
            held = sum(flat.numel() for flat in flats)  # a part of the padding at the end may be saved
            if -(-held // align) != -(-start // align):
                raise ValueError(f"the ranks hold {held} elements of group {number}, the names make it {start}")

    def _stage_3(
        self, shapes: Mapping[str, Size], states: list[Mapping[str, Any]]
    ) -> Iterator[tuple[str, list[TensorPart]]]:
        world, start = len(states), 0
        for name, shape in shapes.items():
            total = math.prod(shape)
            share = -(-total // world)
            parts = []
            for rank, state in enumerate(states):
                held = max(0, min(share, total - rank * share))
                parts += _cut(state["fp32_flat_groups"], start, held, place=rank * share)
            yield name, parts
            start += share
        lengths = {sum(flat.numel() for flat in state["fp32_flat_groups"]) for state in states}
        if lengths != {start}:
            raise ValueError(f"the ranks hold {sorted(lengths)} elements, the names make it {start}")

    def _with_rest(self, trained: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """In the module's order: the trained ones, buffers, frozen parameters, and names that share a tensor."""
        buffers, shared = set(self.states.get("buffer_names") or ()), self.states.get("shared_params") or {}
        frozen = self._frozen()
        found: dict[str, torch.Tensor] = {}
        absent, other = [], []
        for name, value in self.module.items():
            whole = trained.get(shared.get(name, name), frozen.get(name))
            if whole is None and _is_tensor(value) and (name in buffers or value.numel()):
                whole = value.float() if name in buffers and value.is_floating_point() else value
            if whole is None:
                absent.append(str(name))
                continue
            found[name] = whole
            if name in trained and value.shape == whole.shape and not _equal(whole.to(value.dtype), value):
                other.append(str(name))
        found |= {name: value for name, value in trained.items() if name not in found}
        notes = [f"in the module and in no file, left out: {listed(absent, 8)}"] if absent else []
        if other:
            notes.append(f"other values than in the module that was saved with them: {listed(other, 8)}")
        return found, notes

    def _frozen(self) -> dict[str, torch.Tensor]:
        shapes = self._shapes([self.states.get("frozen_param_shapes") or {}])
        if not shapes:
            return {}
        files = self._all_of(self.models, "model_states.pt", len(self.optims) if len(self.models) > 1 else 1)
        fragments = [_contents(file)["frozen_param_fragments"] for file in files]
        found = {}
        for name, shape in shapes.items():
            flat = torch.cat([each[name].reshape(-1) for each in fragments])
            found[name] = flat[: math.prod(shape)].view(shape)
        return found


def _cut(flats: Sequence[torch.Tensor], start: int, length: int, place: int = 0) -> list[TensorPart]:
    """Elements [start, start + length) of vectors that follow one another, which begin at `place` in their tensor."""
    parts, at = [], 0
    for flat in flats:
        first, last = max(start, at), min(start + length, at + flat.numel())
        if first < last:
            piece = flat[first - at : last - at]
            parts.append(TensorPart((place + first - start,), (last - first,), partial(_same, piece)))
        at += flat.numel()
    return parts


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _contents(file: Path) -> Mapping[str, Any]:
    return _mapping(read_torch_file(file, stand_ins=True), "content", file)


def _optimizer_state(file: Path) -> Mapping[str, Any]:
    return _mapping(_contents(file)["optimizer_state_dict"], "optimizer_state_dict", file)


def _mapping(value: Any, what: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CorruptCheckpointError(f"{path}: its {what} is not a dictionary", path=path)
    return value


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
