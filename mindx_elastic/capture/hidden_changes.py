"""Weights that the training changes without torch's knowledge: ``p.data.mul_(...)``, code in C++ or CUDA.

No version counter moves and no optimizer steps, so the update gate takes the state for that of the last boundary when
it is not: a momentum encoder (MoCo, BYOL, DINO) that follows by ``.data`` in each forward has moved on when a peer
dies in the backward. Copies of all such weights at each boundary would cost their memory, so a few elements of each
parameter are compared:

=============================  ========================================================================================
in some steps of a process     between a boundary and the first update behind it, and between the last update and the
                               next boundary (`UpdateWindow`): the first steps, then two in fifty
once something was found       at every boundary elements are kept, and whoever is about to read compares: a state that
                               has changed is no boundary, as with changes that are counted
=============================  ========================================================================================

A step of a program that has none of this costs one comparison of two booleans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindx_elastic.core.events import logger

__all__ = ["HiddenChanges", "ParameterSamples", "Sample", "is_capturing"]

_ELEMENTS = 4
_FIRST, _EVERY = 4, 50


@dataclass(frozen=True)
class Sample:
    """A few elements of each parameter, and its version counter."""

    versions: tuple[int, ...]
    groups: tuple[torch.Tensor, ...]
    owners: tuple[torch.Tensor, ...]
    """Whose each element is, by number of the parameter."""


class ParameterSamples:
    """Takes samples. Any thread."""

    def __init__(self, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._views: tuple[list[int], list[list[torch.Tensor]], tuple[torch.Tensor, ...]] = ([], [], ())

    @torch.no_grad()
    def take(self) -> Sample:
        """Of the parameters as they are now."""
        parameters = self._parameters()
        own = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        usable = [
            (number, t)
            for number, t in enumerate(own)
            if t.layout is torch.strided and not t.is_meta and not t.is_quantized and t.numel()
        ]
        places = [t.data_ptr() for _, t in usable]
        views = self._views
        if views[0] != places:
            self._views = views = (places, *_views_of(usable))
        groups = tuple(torch.cat(group) for group in views[1])
        return Sample(tuple(p._version for p in parameters), groups, views[2])

    def num_hidden(self, before: Sample) -> int:
        """How many parameters are others than in `before` though their version counters have not moved."""
        now = self.take()
        if len(now.versions) != len(before.versions) or len(now.groups) != len(before.groups):
            return 0  # other parameters
        still = [a == b for a, b in zip(before.versions, now.versions, strict=True)]
        found: set[int] = set()
        for owners, one, other in zip(now.owners, before.groups, now.groups, strict=True):
            if one.shape != other.shape or one.dtype != other.dtype:
                return 0
            bits = (one.view(torch.uint8) != other.view(torch.uint8)).view(len(one), -1).any(1)
            found.update(n for n in owners[bits.cpu()].tolist() if still[n])
        return len(found)


def is_capturing() -> bool:
    """Whether what this thread computes goes into a CUDA graph, in which nothing can be read from the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _views_of(tensors: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[list[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Views of some elements of each tensor, by device and type, and whose they are."""
    groups: dict[Any, list[torch.Tensor]] = {}
    owners: dict[Any, list[int]] = {}
    for number, each in tensors:
        tensor = each.detach()
        if tensor.is_contiguous():
            flat = tensor.view(-1)
            pieces = [flat[:: max(1, -(-len(flat) // _ELEMENTS))], flat[-1:]]
        else:
            pieces = [tensor[(at,) * tensor.ndim].reshape(1) for at in (0, -1)]
        key = (tensor.device, tensor.dtype)
        groups.setdefault(key, []).extend(pieces)
        owners.setdefault(key, []).extend(number for piece in pieces for _ in range(len(piece)))
    return list(groups.values()), tuple(map(torch.tensor, owners.values()))


class HiddenChanges:
    """One per guard: those between a boundary and the next update. Training thread; `problem` in any."""

    def __init__(self, samples: ParameterSamples, changes: Callable[[], str | None]) -> None:
        """`changes`: what the version counters tell, as `UpdateGate.changed_since_boundary`."""
        self._samples, self._changes = samples, changes
        self.sample: Sample | None = None
        """As of the last boundary, where that was to be looked at."""
        self.next_look = 0
        """`at_boundary` has nothing to do at an earlier step, unless there is a sample."""
        self._boundaries = 0
        self.are_known = False
        """They were seen."""

    def at_boundary(self, step: int) -> None:
        """Boundary `step` has just been copied."""
        self._boundaries += 1
        is_due = self.are_known or step >= self.next_look
        self.sample = self._samples.take() if is_due else None
        if is_due:
            is_first = self.are_known or self._boundaries < _FIRST
            self.next_look = next(s for s in count(step + 1) if is_first or (s + 1) % _EVERY <= 1)

    def before_update(self) -> bool:
        """The first optimizer behind a boundary is about to step. Returns whether such changes were found just now."""
        if self.are_known or self.sample is None or is_capturing() or self._changes() is not None:
            return False
        num = self._samples.num_hidden(self.sample)
        if num == 0:
            self.sample = None
            return False
        self.are_known = True
        logger.info(
            "%d parameters change in front of the step's update and without torch's knowledge (through .data, or by "
            "code in C++ or CUDA). A step that is cut off behind that, by an exception or a killed peer, is not saved; "
            "periodic=... or snapshot_every=1 bounds what that costs",
            num,
        )
        return True

    def problem(self) -> str | None:
        """Why the live weights are not those of the last boundary, where `Sample` shows it; None: they may be."""
        sample = self.sample
        if not self.are_known or sample is None or (num := self._samples.num_hidden(sample)) == 0:
            return None
        return f"{num} parameters were changed since the boundary without torch's knowledge (through .data, say)"
