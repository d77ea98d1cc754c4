"""Finds random generators that the training draws from and that the guard does not keep.

One draw between two boundaries may belong to an evaluation or to the start; a second one is certain.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mindx_elastic.guard.checks.named_state import NamedState
from mindx_elastic.guard.checks.program_variables import Found, Seen
from mindx_elastic.guard.checks.remedies import Remedies
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Generators"]

_MOVES = 2
_MOST = 256
_MOST_NAMES = 3
"""More generators are told by the objects that have them."""


class _Look(NamedTuple):
    """At a generator's state."""

    state: Any
    seed: object
    """What is the same as long as the generator has not been seeded again. Of a Mersenne twister: the 624 words that
    the next numbers are made of, which go on to others, too."""

    def shows_draws(self, now: _Look) -> bool:
        """Whether numbers were drawn until `now`, for certain."""
        if self.seed != now.seed:
            return False
        return bool(self.state < now.state) if type(self.state) is int else self.state != now.state


def _look_at(generator: Any) -> _Look | None:
    """None for a generator whose state cannot be read."""
    try:
        if isinstance(generator, torch.Generator):
            return _Look(bytes(generator.get_state().numpy()), generator.initial_seed())
        if isinstance(generator, random.Random):
            *words, place = random.Random.getstate(generator)[1]
            return _Look(place, words)
        if isinstance(generator, np.random.RandomState):
            _, words, place, *_ = generator.get_state(legacy=True)
            return _Look(place, np.asarray(words).tobytes())
        bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
        state = bits.state
        inner = state.get("state")
        return _Look(repr(state), (type(bits), inner.get("inc") if isinstance(inner, dict) else None))
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
        return None


@dataclass
class _Watched:
    """Some cannot be referred to weakly, so they are held, as small as they are, until a search does not find them."""

    found: Found
    look: _Look | None = None
    epoch: int = 0
    moves: int = 0


class Generators:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged, remedies: Remedies) -> None:
        self._unmanaged, self._remedies = unmanaged, remedies
        self.watched: dict[int, _Watched] = {}
        """`compare` has something to do."""
        self._global = _global_generators()

    def watch(self, seen: Seen, kept: NamedState) -> None:
        """Watch those of `seen` that are not kept. The next comparison is the first look at a new one."""
        before, self.watched = self.watched, {}
        own = [
            (k, f) for k, f in seen.of["generator"].items() if k not in self._global and not kept.has_object(f.value)
        ]
        for key, found in own[:_MOST]:
            self.watched[key] = before.get(key) or _Watched(found)

    def compare(self, epoch: int, *, tells: bool) -> None:
        """With the look before. Raises UnmanagedStateError."""
        often: list[Found] = []
        for watched in self.watched.values():
            old, old_epoch = watched.look, watched.epoch
            watched.look, watched.epoch = _look_at(watched.found.value), epoch
            if not tells or old is None or watched.look is None or old_epoch != epoch:
                continue
            if old.shows_draws(watched.look):
                watched.moves += 1
                if watched.moves == _MOVES:
                    often.append(watched.found)
        if often:
            self._tell(often)

    def _tell(self, often: Sequence[Found]) -> None:
        names = [found.name for found in often]
        if len(names) > _MOST_NAMES:
            names = list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))
        more = f" (and {len(often) - 1} more)" if len(often) > 1 else ""
        remedy = f"{self._remedies.stateful_line(names)}, or seed it in each step"
        if owner := names[0].rpartition(".")[0]:
            remedy += f". Name whatever else of {owner} changes in the training, too"
        self._unmanaged.certain(f"generator {often[0]}{more} draws numbers in the training and is not kept", remedy)


def _global_generators() -> set[int]:
    """The generators that the guard keeps anyway."""
    found = {id(torch.default_generator), id(random._inst), id(np.random.mtrand._rand)}
    found.add(id(np.random.mtrand._rand._bit_generator))
    if torch.cuda.is_available():
        found.update(map(id, torch.cuda.default_generators))
    return found
