"""A few elements of each parameter, to compare with them later: whoever exchanges or changes weights changes some."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.core.tensor_memory import memory_of

__all__ = ["WeightSample", "WeightSamples", "same_elements", "sample_of"]

_DIGITS = 16  # of a digest
_STOCK = frozenset((torch.Tensor, torch.nn.Parameter))
_PIECES = 4  # a sample has an element more, of a large parameter the first one and about the last


@dataclass(frozen=True)
class WeightSample:
    """Of one module, or other tensors."""

    groups: Sequence[torch.Tensor]
    """The elements, by device and type."""
    owners: Sequence[Sequence[tuple[int, int]]]
    """In each group, one after the other: the number of a parameter, and how many elements are its own."""
    versions: Sequence[int]
    """The version counter of each parameter."""


class WeightSamples:
    """Takes samples of the named modules. Any thread.

    No view of a parameter is kept: it would keep the memory that a program gives back when it moves its weights.
    """

    def __init__(self, collector: Collector) -> None:
        self._modules = {n: c for n, c in collector.components.items() if isinstance(c, ModuleComponent)}

    def take(self) -> dict[str, WeightSample]:
        """By module, of the weights as they are now."""
        return {name: sample_of(component.live_parameters()) for name, component in self._modules.items()}

    def digests(self) -> dict[str, str]:
        """Of a sample of each module, the same where the elements are."""
        found: dict[str, str] = {}
        for name, sample in self.take().items():
            elements = hashlib.sha256()
            for group in sample.groups:
                elements.update(memory_of(group.cpu().contiguous()))
            found[name] = elements.hexdigest()[:_DIGITS]
        return found

    def changed_since(self, before: Mapping[str, WeightSample]) -> list[str]:
        """The modules of which an element is another now."""
        now = self.take()
        return [name for name, sample in before.items() if not same_elements(sample, now[name])]

    def num_hidden(self, before: Mapping[str, WeightSample]) -> int:
        """How many parameters have other elements now though their version counters have not moved."""
        now = self.take()
        return sum(_num_hidden(sample, now[name]) for name, sample in before.items())


@torch.no_grad()
def sample_of(parameters: Sequence[torch.Tensor]) -> WeightSample:
    """A few elements of each, as they are now."""
    groups: dict[Any, list[torch.Tensor]] = {}
    owners: dict[Any, list[tuple[int, int]]] = {}
    for number, parameter in enumerate(parameters):
        tensor = parameter if type(parameter) in _STOCK else local_part(parameter)
        if tensor.numel() and (piece := _piece(tensor)) is not None:
            key = (tensor.device, tensor.dtype)
            groups.setdefault(key, []).append(piece)
            owners.setdefault(key, []).append((number, len(piece)))
    versions = [-1 if p.is_inference() else p._version for p in parameters]
    return WeightSample([torch.cat(group) for group in groups.values()], list(owners.values()), versions)


def _piece(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of some elements, in one dimension; None: it has none in memory that can be picked. One made of other
    tensors need not."""
    is_simple = not tensor.is_meta and not tensor.is_quantized and not hasattr(tensor, "__tensor_flatten__")
    if not is_simple or tensor.layout is not torch.strided:
        return None
    is_dense = tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # in another order, without gaps
    )
    if not is_dense:
        return tensor[tuple(size - 1 for size in tensor.shape)].reshape(1)
    last = tensor.numel() - 1
    step = max(1, last // _PIECES)
    return tensor.as_strided((1 + min(_PIECES, last // step),), (step,), tensor.storage_offset())


def same_elements(one: WeightSample, other: WeightSample) -> bool:
    """Bit for bit, so that nan equals nan."""
    return _fit(one, other) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one.groups, other.groups, strict=True)
    )


def _num_hidden(before: WeightSample, now: WeightSample) -> int:
    if not _fit(before, now):
        return 0  # other parameters
    still = [a == b for a, b in zip(before.versions, now.versions, strict=True)]
    found: set[int] = set()
    for owners, one, other in zip(now.owners, before.groups, now.groups, strict=True):
        differ = (one.view(torch.uint8) != other.view(torch.uint8)).view(len(one), -1).any(1)
        if differ.any():
            numbers = [number for number, length in owners for _ in range(length)]
            found.update(n for n, differs in zip(numbers, differ.tolist(), strict=True) if differs and still[n])
    return len(found)


def _fit(one: WeightSample, other: WeightSample) -> bool:
    return len(one.versions) == len(other.versions) and [(g.shape, g.dtype) for g in one.groups] == [
        (g.shape, g.dtype) for g in other.groups
    ]
