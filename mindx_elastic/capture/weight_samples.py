"""A few elements of each parameter, to compare with them later: an exchange or change of weights changes some."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple

import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.core.tensor_memory import memory_of

__all__ = ["WeightSample", "WeightSamples", "same_elements", "sample_of"]

_DIGITS = 16  # of a digest
_STOCK = frozenset((torch.Tensor, torch.nn.Parameter))
_PIECES = 4  # a sample has an element more, of a large parameter the first one and about the last


class WeightSample(NamedTuple):
    """A sample of one module, or of other tensors."""

    kinds: Sequence[tuple[torch.device, torch.dtype]]
    groups: Sequence[torch.Tensor]
    """The elements of each device and type."""
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
        """Samples of the weights as they are now, by module."""
        found: dict[str, WeightSample] = {}
        for name, component in self._modules.items():  # this is done in steps of the training: no call for nothing
            found[name] = sample_of(component.live_parameters())
        return found

    def digests(self) -> dict[str, str]:
        """Digests of a sample of each module: equal where the elements are."""
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

    def num_hidden(self, before: Mapping[str, WeightSample], now: Mapping[str, WeightSample] | None = None) -> int:
        """How many parameters have other elements now though their version counters have not moved. `now`: the sample
        of this moment, where there is one."""
        after = self.take() if now is None else now
        total = 0
        for name, sample in before.items():
            total += _num_hidden(sample, after[name])
        return total


@torch.no_grad()
def sample_of(parameters: Sequence[torch.Tensor]) -> WeightSample:
    """A few elements of each, as they are now."""
    groups: dict[Any, list[torch.Tensor]] = {}
    owners: dict[Any, list[tuple[int, int]]] = {}
    versions: list[int] = []
    for number, parameter in enumerate(parameters):
        versions.append(-1 if parameter.is_inference() else parameter._version)
        tensor = parameter if type(parameter) in _STOCK else local_part(parameter)
        # One made of other tensors need not have elements in memory that can be picked.
        is_simple = not tensor.is_meta and not tensor.is_quantized and not hasattr(tensor, "__tensor_flatten__")
        if not tensor.numel() or not is_simple or tensor.layout is not torch.strided:
            continue
        if tensor.is_contiguous() or (
            tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # in another order, no gaps
        ):
            last = tensor.numel() - 1
            step = max(1, last // _PIECES)
            piece = tensor.as_strided((1 + min(_PIECES, last // step),), (step,), tensor.storage_offset())
        else:
            piece = tensor[tuple([size - 1 for size in tensor.shape])].reshape(1)
        key = (tensor.device, tensor.dtype)
        groups.setdefault(key, []).append(piece)
        owners.setdefault(key, []).append((number, len(piece)))
    return WeightSample([*groups], [*map(torch.cat, groups.values())], [*owners.values()], versions)


def same_elements(one: WeightSample, other: WeightSample) -> bool:
    """Bit for bit, so that nan equals nan."""
    if not _fit(one, other):
        return False
    for ours, theirs in zip(one.groups, other.groups, strict=True):
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            return False
    return True


def _num_hidden(before: WeightSample, now: WeightSample) -> int:
    if not _fit(before, now):
        return 0  # other parameters
    still = [*map(eq, before.versions, now.versions)]
    found: set[int] = set()
    for owners, one, other in zip(now.owners, before.groups, now.groups, strict=True):
        differ = (one.view(torch.uint8) != other.view(torch.uint8)).view(len(one), -1).any(1)
        if differ.any():
            numbers = [number for number, length in owners for _ in range(length)]
            found.update(n for n, differs in zip(numbers, differ.tolist(), strict=True) if differs and still[n])
    return len(found)


def _fit(one: WeightSample, other: WeightSample) -> bool:
    """Whether they are of the same elements."""
    is_same_number = len(one.versions) == len(other.versions)
    return is_same_number and one.kinds == other.kinds and one.owners == other.owners
