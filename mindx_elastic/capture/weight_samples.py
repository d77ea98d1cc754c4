"""A few elements of each parameter, to compare with them later: whoever exchanges or changes weights changes some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent

__all__ = ["WeightSample", "WeightSamples"]

_ELEMENTS = 4


@dataclass(frozen=True)
class WeightSample:
    """Of one module."""

    groups: Sequence[torch.Tensor]
    """The elements, by device and type."""
    owners: Sequence[Sequence[int]]
    """Whose each element is, by number of the parameter."""
    versions: Sequence[int]
    """The version counter of each parameter."""


class WeightSamples:
    """Takes samples of the named modules. Any thread. Keep one, so that a sample takes microseconds."""

    def __init__(self, collector: Collector) -> None:
        self._modules = {n: c for n, c in collector.components.items() if isinstance(c, ModuleComponent)}
        self._views: dict[str, _Views] = {}

    @torch.no_grad()
    def take(self) -> dict[str, WeightSample]:
        """By module, of the weights as they are now."""
        return {name: self._of(name, component) for name, component in self._modules.items()}

    def changed_since(self, before: Mapping[str, WeightSample]) -> list[str]:
        """The modules of which an element is another now."""
        now = self.take()
        return [name for name, sample in before.items() if not _same(sample, now[name])]

    def num_hidden(self, before: Mapping[str, WeightSample]) -> int:
        """How many parameters have other elements now though their version counters have not moved."""
        now = self.take()
        return sum(_num_hidden(sample, now[name]) for name, sample in before.items())

    def _of(self, name: str, component: ModuleComponent) -> WeightSample:
        parameters = component.live_parameters()
        local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        usable = {
            number: t
            for number, t in enumerate(local)
            if t.layout is torch.strided and not t.is_meta and not t.is_quantized and t.numel()
        }
        places = [t.data_ptr() for t in usable.values()]
        views = self._views.get(name)
        if views is None or views.places != places:
            views = self._views[name] = _Views(places, usable)
        groups = [torch.cat(group) for group in views.groups]
        return WeightSample(groups, views.owners, [p._version for p in parameters])


class _Views:
    """Views of some elements of each tensor."""

    def __init__(self, places: list[int], tensors: Mapping[int, torch.Tensor]) -> None:
        self.places = places
        """Where the tensors are in memory."""
        groups: dict[Any, list[torch.Tensor]] = {}
        owners: dict[Any, list[int]] = {}
        for number, each in tensors.items():
            tensor = each.detach()
            if tensor.is_contiguous():
                flat = tensor.view(-1)
                pieces = [flat[:: max(1, -(-len(flat) // _ELEMENTS))], flat[-1:]]
            else:
                pieces = [tensor[(at,) * tensor.ndim].reshape(1) for at in (0, -1)]
            key = (tensor.device, tensor.dtype)
            groups.setdefault(key, []).extend(pieces)
            owners.setdefault(key, []).extend(number for piece in pieces for _ in range(len(piece)))
        self.groups, self.owners = list(groups.values()), list(owners.values())


def _same(one: WeightSample, other: WeightSample) -> bool:
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
        differ = (one.view(torch.uint8) != other.view(torch.uint8)).view(len(one), -1).any(1).tolist()
        found.update(number for number, differs in zip(owners, differ, strict=True) if differs and still[number])
    return len(found)


def _fit(one: WeightSample, other: WeightSample) -> bool:
    return len(one.versions) == len(other.versions) and [(g.shape, g.dtype) for g in one.groups] == [
        (g.shape, g.dtype) for g in other.groups
    ]
