"""Buffers with ``persistent=False``: in no state_dict, and still state where a training changes them or makes them at
random. Small ones are kept, large ones (a mask, a table) once they have changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.dtensors import local_part, with_layout_of

__all__ = ["LooseBuffers"]

_SMALL = 1 << 20  # bytes


class LooseBuffers:
    """Of one module and everything below it. A buffer is copied anew only when its version counter has moved."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: list[tuple[str, dict[str, Any], str]] = []
        self._seen: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._copies: dict[str, torch.Tensor | None] = {}
        self.follow()

    def follow(self) -> None:
        """Find the buffers that there are now."""
        known = {name: (t, v) for (name, _, _), t, v in zip(self._slots, self._seen, self._versions, strict=True)}
        self._slots = list(_slots(self._module))
        self._seen, self._versions = [], []
        for name, table, key in self._slots:
            tensor, version = known.get(name, (None, -1))
            if name not in known:
                tensor = table[key]
                large = tensor is not None and tensor.nbytes > _SMALL
                version = _version(tensor) if large else -1  # -1: copy it at the next boundary
            self._seen.append(tensor)
            self._versions.append(version)
        self._copies = {name: copy for name, copy in self._copies.items() if name in {n for n, _, _ in self._slots}}

    def copy(self) -> None:
        for number, (name, table, key) in enumerate(self._slots):
            tensor = table.get(key)
            if tensor is self._seen[number] and _version(tensor) == self._versions[number]:
                continue
            self._seen[number], self._versions[number] = tensor, _version(tensor)
            self._copies[name] = None if tensor is None else tensor.detach().clone()

    def state(self) -> dict[str, torch.Tensor | None]:
        return {name: None if t is None else local_part(t) for name, t in self._copies.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """In place where shape and type fit. Names that this module lacks are passed over."""
        slots = {name: (table, key) for name, table, key in self._slots}
        for name, value in state.items():
            if name not in slots:
                continue
            table, key = slots[name]
            live = table[key]
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                table[key] = _filled(live, with_layout_of(live, value).to(live.device))
            else:
                table[key] = value
            self._copies[name] = None if table[key] is None else table[key].detach().clone()
        self.copy()


def _slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for prefix, child in module.named_modules():
        for key in child._buffers:
            if key in child._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), child._buffers, key


def _filled(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """`live` with the values of `saved`, in place where it can be; else `saved`."""
    if live.shape != saved.shape or live.dtype != saved.dtype:
        return saved
    if not torch.equal(live, saved):
        if any(step == 0 and size > 1 for step, size in zip(live.stride(), live.shape, strict=True)):
            return saved  # expanded: several elements share one place
        live.copy_(saved)
    return live


def _version(tensor: torch.Tensor | None) -> int:
    """-1 where there is none (made in inference mode): copied at every boundary."""
    return -2 if tensor is None else -1 if tensor.is_inference() else tensor._version
