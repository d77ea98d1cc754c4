"""Finds random generators that the training draws from and that the guard does not keep.

One draw between two boundaries may belong to an evaluation or to the start; a second one is certain.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
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
    remedy: str
    look: GeneratorLook | None = None
    epoch: int = 0
    moves: int = 0


class Generators:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged, remedies: Remedies) -> None:
        self._unmanaged, self._remedies = unmanaged, remedies
        self._watched: dict[int, _Watched] = {}
        self._global = _global_generators()
        self._told: list[str] = []

    def watch(self, seen: Seen, kept: Kept) -> None:
        """Watch those of `seen` that are not kept. The next comparison is the first look at a new one."""
        before, self._watched = self._watched, {}
        own = [(k, f) for k, f in seen.generators.items() if k not in self._global and not kept.has_object(f.value)]
        in_loaders = _in_loaders(seen, kept) if own else set()
        for key, found in [(k, f) for k, f in own if k not in in_loaders][:_MOST]:
            self._watched[key] = before.get(key) or _Watched(found, self._remedies.how_to_keep(found))

    def compare(self, epoch: int, *, tells: bool) -> None:
        """With the look before. Raises UnmanagedStateError."""
        often = []
        for watched in self._watched.values():
            old, old_epoch = watched.look, watched.epoch
            watched.look, watched.epoch = GeneratorLook.at(watched.found.value), epoch
            if not tells or old is None or watched.look is None or old_epoch != epoch:
                continue
            if old.movement(watched.look) is Movement.MOVED:
                watched.moves += 1
                if watched.moves >= _MOVES:
                    often.append(watched)
        if often:
            self._tell(often)

    def _tell(self, often: Sequence[_Watched]) -> None:
        """Once for all of them. What is said to be named is not told again."""
        new = [w for w in often if not any(_is_in(w.found.name, name) for name in self._told)]
        if not new:
            return
        first, names = new[0].found, [w.found.name for w in new]
        if len(new) == 1:
            what, remedy = f"generator {first} draws numbers in the training and is not kept", new[0].remedy
        else:
            if len(names) > _MOST_NAMES:
                names = list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))
            what = f"generator {first} and {len(new) - 1} more draw numbers in the training and are not kept"
            remedy = f"Write {self._remedies.stateful_line(names)}"
        remedy += ", or seed it anew in each step" if len(new) == 1 else ", or seed them anew in each step"
        if owner := names[0].rpartition(".")[0]:
            remedy += f". Name whatever else of {owner} changes in the training, too"
        self._told += names
        self._unmanaged.certain(what, remedy)


def _is_in(name: str, holder: str) -> bool:
    return name.startswith(holder) and name[len(holder) :][:1] in ("", ".", "[")


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
