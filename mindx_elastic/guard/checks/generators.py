"""Finds random generators that the training draws from and that the guard does not keep.

One draw between two boundaries may belong to an evaluation or to the start; a second one is certain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.movements import GeneratorLook, Movement
from mindx_elastic.guard.checks.surroundings import Found, Seen, reachable
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Generators"]

_MOVES = 2
_MOST = 256


@dataclass
class _Watched:
    """Some cannot be referred to weakly, so they are held, as small as they are, until the program has them no more."""

    generator: Any
    look: GeneratorLook
    epoch: int
    moves: int = 0


class Generators:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged, how_to_keep: Callable[[Found], str]) -> None:
        self._unmanaged, self._how_to_keep = unmanaged, how_to_keep
        self._watched: dict[int, _Watched] = {}
        self._global = _global_generators()

    def forget(self) -> None:
        """What is drawn until the next look does not count."""
        self._watched = {}

    def look(self, seen: Seen, kept: Kept, epoch: int) -> None:
        """Compare those that the program has now with those of the look before. Raises UnmanagedStateError."""
        before, self._watched = self._watched, {}
        own = [(k, f) for k, f in seen.generators.items() if k not in kept.objects and k not in self._global]
        in_loaders = _in_loaders(seen, kept) if own else set()
        for key, found in own:
            now = None if key in in_loaders else GeneratorLook.at(found.value)
            if now is None or len(self._watched) >= _MOST:
                continue
            watched = self._watched[key] = _Watched(found.value, now, epoch)
            if (old := before.get(key)) is None:
                continue
            watched.moves = old.moves
            if old.look.movement(now) is Movement.MOVED:
                watched.moves += old.epoch == epoch
                self._tell(found, watched.moves, between_epochs=old.epoch != epoch)

    def _tell(self, found: Found, moves: int, *, between_epochs: bool) -> None:
        remedy = f"{self._how_to_keep(found)}, or seed it anew in each step"
        if owner := found.name.rpartition(".")[0]:
            remedy += f". Name whatever else of {owner} changes in the training, too"
        if between_epochs and moves < _MOVES:
            self._unmanaged.risk(f"generator {found} draws numbers between epochs and is not kept", remedy)
        if moves >= _MOVES:
            self._unmanaged.certain(f"generator {found} draws numbers in the training and is not kept", remedy)


def _in_loaders(seen: Seen, kept: Kept) -> set[int]:
    """What hangs on loaders is their own business."""
    found: set[int] = set()
    for key, loader in seen.loaders.items():
        if key not in kept.objects and key not in found:
            found |= reachable(loader.value, models=False).keys()
    return found


def _global_generators() -> set[int]:
    """The generators that the guard keeps anyway."""
    found = {id(torch.default_generator), id(random._inst), id(np.random.mtrand._rand)}
    found.add(id(np.random.mtrand._rand._bit_generator))
    if torch.cuda.is_available():
        found.update(map(id, torch.cuda.default_generators))
    return found
