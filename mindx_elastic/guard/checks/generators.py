"""Finds random generators that the training draws from and that the guard does not keep.

One draw between two boundaries may belong to an evaluation or to the start; a second one is certain.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.movements import GeneratorLook, Movement
from mindx_elastic.guard.checks.remedies import Remedies
from mindx_elastic.guard.checks.surroundings import Found, Seen, reachable
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Generators"]

_MOVES = 2
_MOST = 256
_MOST_NAMES = 3
"""More generators are told by the objects that have them."""


@dataclass
class _Watched:
    """Some cannot be referred to weakly, so they are held, as small as they are, until a search does not find them."""

    found: Found
    look: GeneratorLook
    epoch: int
    moves: int = 0


class Generators:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged, remedies: Remedies) -> None:
        self._unmanaged, self._remedies = unmanaged, remedies
        self._watched: dict[int, _Watched] = {}
        self._global = _global_generators()
        self._told: list[str] = []

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
        often, between_epochs = [], []
        for watched in self._watched.values():
            if (now := GeneratorLook.at(watched.found.value)) is None:
                continue
            old, is_new_epoch = watched.look, watched.epoch != epoch
            watched.look, watched.epoch = now, epoch
            if old.movement(now) is Movement.MOVED:
                watched.moves += not is_new_epoch
                if watched.moves >= _MOVES:
                    often.append(watched.found)
                elif is_new_epoch:
                    between_epochs.append(watched.found)
        if often:  # those beside them in the same list, too, which may not have drawn yet
            places = {_without_numbers(found.name) for found in often}
            beside = [w.found for w in self._watched.values() if _without_numbers(w.found.name) in places]
            self._tell(beside, self._unmanaged.certain)
        if between_epochs:
            self._tell(between_epochs, self._unmanaged.risk, " between epochs")

    def _tell(
        self, generators: Sequence[Found], tell: Callable[[str, str], None], when: str = " in the training"
    ) -> None:
        """Once for all of them. What is said to be named is not told again."""
        new = [found for found in generators if not any(_is_in(found.name, name) for name in self._told)]
        if not new:
            return
        first, names = new[0], [new[0].name]
        if len(new) == 1:
            what, remedy = f"generator {first} draws numbers{when} and is not kept", self._remedies.how_to_keep(first)
        else:
            names = _holders(found.name for found in new)
            what = f"generator {first} and {len(new) - 1} more draw numbers{when} and are not kept"
            remedy = f"Write {self._remedies.stateful_line(names)}"
        remedy += ", or seed it anew in each step" if len(new) == 1 else ", or seed them anew in each step"
        if owner := names[0].rpartition(".")[0]:
            remedy += f". Name whatever else of {owner} changes in the training, too"
        tell(what, remedy)
        self._told += names


def _holders(names: Iterable[str]) -> list[str]:
    """A few names that stand for all: of the objects that have them, from the innermost on."""
    parts = [re.findall(r"^[^.[]+|\.[^.[]+|\[[^]]*\]", name) for name in names]
    while len(parts) > _MOST_NAMES and (deepest := max(map(len, parts))) > 1:
        parts = [each[:-1] if len(each) == deepest else each for each in parts]
        parts = [each for number, each in enumerate(parts) if each not in parts[:number]]
    found = list(map("".join, parts))
    return [name for name in found if not any(name != other and _is_in(name, other) for other in found)]


def _is_in(name: str, holder: str) -> bool:
    return name.startswith(holder) and name[len(holder) :][:1] in ("", ".", "[")


def _without_numbers(name: str) -> str:
    return re.sub(r"\[[^]]*\]", "[]", name)


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
