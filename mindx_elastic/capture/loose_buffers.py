"""Buffers with ``persistent=False``: in no state_dict, and still state where a training changes them or makes them at
random. Small ones are kept, large ones (a mask, a table) once they have changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.dtensors import local_part, with_layout_of
from mindx_elastic.capture.module_tables import buffers_of
from mindx_elastic.capture.tensor_copy import TensorCopy

__all__ = ["LooseBuffers"]

_SMALL = 1 << 20  # bytes


class LooseBuffers:
    """The non-persistent buffers of one module and everything below it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: list[tuple[str, dict[str, Any], str]] = []
        self._kept: dict[str, TensorCopy | None] = {}
        """None: the place holds no tensor."""
        self._replaced: set[str] = set()  # not as the program has built them: None there is state too
        self._changed: set[str] = set()  # replaced, or loaded with other values than the program builds
        self.follow()

    def follow(self) -> None:
        """Find the buffers that there are now."""
        self._slots = list(_slots(self._module))
        self.are_used = bool(self._slots)
        """Without any there is nothing to copy."""
        names = {name for name, _, _ in self._slots}
        self._kept = {name: copy for name, copy in self._kept.items() if name in names}
        self._replaced &= names
        for name, table, key in self._slots:
            if name not in self._kept:
                tensor = table[key]
                is_large = tensor is not None and tensor.nbytes > _SMALL
                self._kept[name] = None if tensor is None else TensorCopy(tensor, is_original=is_large)

    def copy(self) -> None:
        """This is a boundary."""
        for name, table, key in self._slots:
            tensor, kept = table.get(key), self._kept[name]
            if kept is not None and tensor is kept.tensor:
                kept.renew()
            elif tensor is not None or kept is not None:
                self._kept[name] = None if tensor is None else TensorCopy(tensor)
                self._replaced.add(name)
                self._changed.add(name)

    def recheck(self) -> None:
        """Also find what moves no version counter. The program has not gone on since `copy`."""
        for name, table, key in self._slots:
            kept = self._kept[name]
            if kept is not None and table.get(key) is kept.tensor:
                kept.recheck()

    def kept(self) -> dict[str, torch.Tensor | None]:
        """The copies of the last boundary."""
        return {name: copy.value for name, copy in self._kept.items() if copy is not None}

    def go_back(self, kept: Mapping[str, torch.Tensor | None]) -> None:
        """Let the copies that `kept` has given count again."""
        for name, copy in self._kept.items():
            if copy is not None and name in kept:
                copy.value = kept[name]

    def state(self) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = {}
        for name, kept in self._kept.items():
            if kept is not None and kept.value is not None:
                found[name] = local_part(kept.value)
            elif kept is None and name in self._replaced:
                found[name] = None
        return found

    def live(self) -> dict[str, torch.Tensor]:
        """The buffers themselves."""
        return {name: t for name, table, key in self._slots if (t := table.get(key)) is not None}

    def changed(self) -> list[str]:
        """Those that the training has changed, so that another rank may have others."""
        return [n for n, copy in self._kept.items() if copy is not None and (copy.has_changed or n in self._changed)]

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load in place where shape and type fit. Names that this module lacks are passed over."""
        slots = {name: (table, key) for name, table, key in self._slots}
        for name, value in state.items():
            if name not in slots:
                continue
            table, key = slots[name]
            live = table[key]
            if not _is_same(live, value):
                self._changed.add(name)
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                table[key] = _filled(live, with_layout_of(live, value).to(live.device))
            else:
                table[key] = value
            self._kept[name] = None if table[key] is None else TensorCopy(table[key])
            self._replaced.add(name)


def _slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for prefix, child in module.named_modules():
        table = buffers_of(child)
        for key in table:
            if key in child._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), table, key


def _is_same(live: Any, saved: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return live is saved
    own = local_part(live)
    alike = own.shape == saved.shape and own.dtype == saved.dtype
    return alike and torch.equal(own, saved.to(own.device))


def _filled(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """`live` with the values of `saved`, in place where it can be; else `saved`."""
    if live.shape != saved.shape or live.dtype != saved.dtype:
        return saved
    if not torch.equal(live, saved):
        if any(step == 0 and size > 1 for step, size in zip(live.stride(), live.shape, strict=True)):
            return saved  # expanded: several elements share one place
        live.copy_(saved)
    return live
