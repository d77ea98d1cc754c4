"""Finds random generators that the training draws from and that the guard does not keep.

One draw between two boundaries may belong to an evaluation or to the start; a second one is certain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

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
    """Some cannot be referred to weakly, so they are held, as small as they are, until a search does not find them."""

    found: Found
    look: GeneratorLook
    epoch: int
    moves: int = 0


class Generators:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged, how_to_keep: Callable[[Found], str]) -> None:
        self._unmanaged, self._how_to_keep = unmanaged, how_to_keep
        self._watched: dict[int, _Watched] = {}
        self._global = _global_generators()

    def take_anew(self, epoch: int) -> None:
        """What was drawn since the last look does not count."""
        for watched in self._watched.values():
            watched.look, watched.epoch = GeneratorLook.at(watched.found.value) or watched.look, epoch

    def watch(self, seen: Seen, kept: Kept, epoch: int) -> None:
        """Watch those of `seen` that are not kept from here on."""
        before, self._watched = self._watched, {}
        own = [(k, f) for k, f in seen.generators.items() if k not in self._global and not kept.has_object(f.value)]
        in_loaders = _in_loaders(seen, kept) if own else set()
        for key, found in own:
            look = None if key in in_loaders else GeneratorLook.at(found.value)
            if look is not None and len(self._watched) < _MOST:
                self._watched[key] = before.get(key) or _Watched(found, look, epoch)

    def compare(self, epoch: int) -> None:
        """With the look before. Raises UnmanagedStateError."""
        for watched in self._watched.values():
            if (now := GeneratorLook.at(watched.found.value)) is None:
                continue
            old, between_epochs = watched.look, watched.epoch != epoch
            watched.look, watched.epoch = now, epoch
            if old.movement(now) is Movement.MOVED:
                watched.moves += not between_epochs
                self._tell(watched.found, watched.moves, between_epochs=between_epochs)

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
        if key not in found and not kept.has_object(loader.value):
            found |= reachable(loader.value, models=False).keys()
    return found


def _global_generators() -> set[int]:
    """The generators that the guard keeps anyway."""
    found = {id(torch.default_generator), id(random._inst), id(np.random.mtrand._rand)}
    found.add(id(np.random.mtrand._rand._bit_generator))
    if torch.cuda.is_available():
        found.update(map(id, torch.cuda.default_generators))
    return found
