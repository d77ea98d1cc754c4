"""Sees whether the first step has used the last batch that it has fetched, where their number alone is ambiguous.

A first step with several batches may be one of a loop that fetches ahead, of one that leaves bad batches out
(``continue``), or of one whose steps take several. In the last two the newest batch goes into a module: what the named
modules are given is compared with a few values of each batch. Where it does not show (the batch was normalised on the
way), the second step tells, as far as their numbers do (`data.look_ahead`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

__all__ = ["FirstUse"]

_MOST_VALUES, _MOST_TENSORS, _DEPTH = 32, 16, 4
_Marks: TypeAlias = "set[tuple[object, ...]]"


class FirstUse:
    """One per loader, until it is known how the loop fetches. Training thread."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # What is compiled as a whole would have a hook compiled into it.
        self._modules = [m for m in modules if type(m).__name__ != "OptimizedModule" and m._compiled_call_impl is None]
        self._batches: list[_Marks] = []  # that were handed out since the last boundary
        self._hooks: list[Any] = []
        self._is_last_used = False

    def see(self, batch: Any) -> None:
        """The loader gives a batch."""
        self._batches.append(_marks(batch))
        self._is_last_used = False
        if len(self._batches) == 2:
            self._hooks = [m.register_forward_pre_hook(self._at_forward, with_kwargs=True) for m in self._modules]

    def _at_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._is_last_used:
            return
        *others, last = self._batches
        self._is_last_used = bool((_marks([args, kwargs]) & last).difference(*others))

    def has_used_last(self) -> bool:
        """A step has ended. Whether it is certain that its last batch is used, and with it all before."""
        self.end()
        return self._is_last_used

    def end(self) -> None:
        """Looks at nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin_anew(self) -> None:
        """What was given so far is for no step."""
        self.end()
        self._batches = []


def _marks(value: Any) -> _Marks:
    """A few values of each tensor in a batch."""
    found: _Marks = set()
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for number, tensor in enumerate(_tensors(value, _DEPTH)):
            if number >= _MOST_TENSORS or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
                break
            flat = tensor.detach().reshape(-1)
            found.add((str(flat.dtype), *flat[:: max(1, flat.numel() // _MOST_VALUES)].tolist()))
    return found


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Those in plain containers, without those that are a number."""
    if type(value) is torch.Tensor:
        if value.numel() > 1 and value.layout is torch.strided and not value.is_quantized and not value.is_meta:
            yield value
    elif depth and type(value) in (list, tuple, dict):
        for one in value.values() if type(value) is dict else value:
            yield from _tensors(one, depth - 1)
