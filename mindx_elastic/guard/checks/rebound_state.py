"""Tells of a named tensor or container whose variable the loop binds again: the checkpoint keeps the first object.

``protos = 0.9 * protos + 0.1 * means`` makes another tensor, of which the guard knows nothing. The name goes on from
step to step and is not kept (`prove.not_kept`), and held a named object when the guard was entered, which nothing
that the program reaches by such a name holds any more. A risk: each step may make it from what the guard keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.guard.checks.program_variables import Seen, look
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["ReboundState"]

_KINDS = (torch.Tensor, np.ndarray, list, dict)


class ReboundState:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged) -> None:
        self._unmanaged = unmanaged
        self._held: dict[str, tuple[str, Any]] = {}
        """The plain named objects, and what the guard calls them, by the names that the program has for them."""

    def at_entry(self, targets: Mapping[str, Any], seen: Seen) -> None:
        """Remember where the program has the plain objects among `targets`, of all of which `seen` has the names."""
        for key, target in targets.items():
            if isinstance(target, _KINDS) and not isinstance(target, nn.Parameter):
                found = [each for each in seen.asked.get(id(target), ()) if each.place]
                self._held.update({each.name: (key, target) for each in found})

    def tell(self, names: Iterable[str], frame: FrameType | None) -> None:
        """`names`: of what goes on from step to step and is not kept."""
        held = {name: self._held[name] for name in names if name in self._held}
        found = look(frame, {}, [id(target) for _, target in held.values()]).asked if held else {}
        # An item is not a name that the loop works with: the dict that was given as `stateful` has it for ever.
        still = {address for address, seen in found.items() if any("[" not in each.name for each in seen)}
        for name, (key, target) in held.items():
            if id(target) not in still:
                self._unmanaged.risk(
                    f'the variable {name} is bound to another object than stateful["{key}"]: checkpoints hold the '
                    "first one",
                    f"Change that object in place, {_in_place(name, target)} where the loop has {name} = ..., or name "
                    "a dict that has it",
                )


def _in_place(name: str, target: Any) -> str:
    if isinstance(target, torch.Tensor):
        return f"{name}.copy_((...).detach())"
    if isinstance(target, np.ndarray):
        return f"{name}[...] = ..."
    if isinstance(target, list):
        return f"{name}[:] = ..."
    return f"new = ...; {name}.clear(); {name}.update(new)"
