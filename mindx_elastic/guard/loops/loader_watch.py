"""Sees every batch of torch DataLoaders while a guard is entered, and tells of those that no position covers.

====================================================  ===========================================================
seen                                                  certain, for
====================================================  ===========================================================
an iterator of a DataLoader that is not named gives   steps use its batches, and a resumed run would begin anew
batches before a boundary and after it
one begins right after a boundary, and the named      an evaluation that a stop at that boundary leaves out, with
loader's epoch goes on                                the numbers that it draws; where the training draws any
an iterator of a named one, made before entry         it gives the epoch's first batches again
====================================================  ===========================================================

What happens in ``guard.outside_step()``, between epochs, in whole inside of one step, or inside of a data set is free.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mindx_elastic.data.random_streams import SeededDataset
from mindx_elastic.data.track import fetching
from mindx_elastic.guard.checks.surroundings import look
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["LoaderWatch", "find_cycle"]

_BEGAN, _MADE, _LOADER = "_mindx_began", "_mindx_made", "_mindx_loader"


class LoaderWatch:
    """One per guard. `at_boundary` belongs to the training thread; what a DataLoader gives is seen in any thread."""

    def __init__(
        self, unmanaged: Unmanaged, adopted: dict[str, DataLoader[Any]], now: Callable[[], tuple[int, int] | None]
    ) -> None:
        """`adopted`: DataLoaders that are named, by name. `now`: how many batches the first named loader has handed
        out and in which iteration, or None between its epochs and without one."""
        self._unmanaged, self._adopted, self._now = unmanaged, adopted, now
        self._thread = threading.get_ident()
        self._boundaries = 0
        self._fetched = 0  # by the first named loader up to the last boundary
        self._crossing: tuple[str, str, bool] | None = None
        self._known: dict[int, weakref.ref[Any]] = {}  # the program's loaders when the guard was entered
        self._told: set[str] = set()
        self._after: tuple[int, str] | None = None  # an evaluation right after a boundary: the iteration, what it read
        self._rng: Any = None  # torch's stream at the boundary before the last one
        self._evaluated = False
        self.has_named = bool(adopted)
        self.is_outside = False
        self._active = False

    def enter(self, stack: ExitStack) -> None:
        """Put the hooks in; `stack` takes them out."""
        stack.callback(self._leave)
        self._active = True
        loaders = look(sys._getframe(1), {}).loaders.values()
        self._known = {id(found.value): weakref.ref(found.value) for found in loaders}
        kind: Any = _BaseDataLoaderIter
        self._originals = {name: getattr(kind, name) for name in ("__init__", "__next__", "_reset")}
        first, following, again = self._originals.values()

        def made(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            first(iterator, loader, *args, **kwargs)
            if self._active:
                iterator.__dict__[_MADE] = self
                iterator.__dict__[_LOADER] = weakref.ref(loader)

        def give(iterator: Any) -> Any:
            if self._active and threading.get_ident() not in fetching and not self.is_outside:
                self._see(iterator)
            return following(iterator)

        def reset(iterator: Any, *args: Any, **kwargs: Any) -> None:
            iterator.__dict__.pop(_BEGAN, None)  # persistent workers: another pass
            again(iterator, *args, **kwargs)

        self._hooks = {"__init__": made, "__next__": give, "_reset": reset}
        for name, hook in self._hooks.items():
            setattr(kind, name, hook)

    def _leave(self) -> None:
        self._active = False
        for name, hook in getattr(self, "_hooks", {}).items():
            if _BaseDataLoaderIter.__dict__.get(name) is hook:
                setattr(_BaseDataLoaderIter, name, self._originals[name])

    def _see(self, iterator: Any) -> None:
        state = iterator.__dict__
        began = state.get(_BEGAN)
        if began is None:
            state[_BEGAN] = self._boundaries
            if state.get(_MADE) is not self:
                self._see_older(iterator)
            elif self._boundaries and self._after is None and threading.get_ident() == self._thread:
                self._see_first(iterator)
        elif began != self._boundaries and self._crossing is None:
            self._crossing = _describe(iterator), _variable(iterator), self._is_later(iterator)

    def _is_later(self, iterator: Any) -> bool:
        """Whether its loader was made after the guard was entered."""
        loader = iterator.__dict__.get(_LOADER, lambda: None)()
        if loader is None or not self._known:
            return False
        known = self._known.get(id(loader))
        return known is None or known() is not loader

    def _see_older(self, iterator: Any) -> None:
        for name, loader in self._adopted.items():
            if iterator._index_sampler is loader._index_sampler and iterator._dataset is loader.dataset:
                self._unmanaged.certain(
                    f"this iterator of {name} was made before the guard was entered, and a resumed run would begin it "
                    "anew",
                    "Make it inside of the block, after `with guard:`",
                )

    def _see_first(self, iterator: Any) -> None:
        now = self._now()
        loader = iterator.__dict__[_LOADER]()
        draws = loader is None or loader.generator is None  # its base seed, from torch's stream
        if now is not None and now[0] == self._fetched and draws:
            self._after = now[1], _describe(iterator)

    def at_boundary(self, rng: Any) -> None:
        """A step has ended. `rng`: torch's stream as it was at the last boundary."""
        now = self._now()
        crossing, after = self._crossing, self._after
        self._boundaries += 1
        self._crossing = self._after = None
        before, self._rng = self._rng, rng
        was_free, self._evaluated = not self._evaluated, after is not None
        self._fetched = now[0] if now is not None else -1
        if crossing is not None:
            what, variable, is_later = crossing
            already = "beside the named ones" if self.has_named else "and no loader is named"
            remedy = f"Write Guard(loader={variable}, ...); for an evaluation, `with guard.outside_step():` around it"
            if is_later:
                remedy = (
                    "It was made after the guard was entered. Make each loader once, before the guard, and write "
                    f"Guard(loader={variable}, ...), a list where there are several; or make one loader over a data "
                    "set that changes. For an evaluation, `with guard.outside_step():` around it"
                )
            self._tell(f"steps use batches of {what}, {already}: its position is not kept", remedy)
        if after is None or now is None or now[1] != after[0] or before is None:
            return
        # Without such numbers in the training itself, those of the evaluation change nothing.
        if was_free and not torch.equal(before, rng):
            self._tell(
                f"{after[1]} is read between step_end() and the next batch, in mid-epoch, and draws random numbers: "
                "a stop at that step leaves both out",
                "Put the evaluation into `with guard.outside_step():`",
            )

    def _tell(self, what: str, remedy: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._unmanaged.certain(what, remedy)


def _describe(iterator: Any) -> str:
    dataset = iterator._dataset
    if isinstance(dataset, SeededDataset):
        dataset = dataset.wrapped
    return f"a DataLoader over {type(dataset).__name__}"


def _variable(iterator: Any) -> str:
    """What the program calls the loader of `iterator`, else ``loader``."""
    loader = iterator.__dict__.get(_LOADER, lambda: None)()
    frame = sys._getframe(2)
    while loader is not None and frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name, value in list(names.items()):
                if value is loader and name.isidentifier() and name != "self":
                    return name
        frame = frame.f_back  # type: ignore[assignment]
    return "loader"


def find_cycle(num_batches: int) -> bool:
    """Whether an `itertools.cycle` has kept as many batches as an epoch had. Takes a tenth of a second: ask once."""
    for one in gc.get_objects():
        if type(one) is itertools.cycle:
            for part in gc.get_referents(one):
                if type(part) is list and len(part) == num_batches:
                    return True
    return False
