"""Sees every batch of DataLoaders and of our loaders while a guard is entered, and tells of those that no position
covers.

====================================================  ===========================================================
seen                                                  certain, for
====================================================  ===========================================================
an iterator of a loader that is not named gives       steps use its batches, and a resumed run would start over
batches before a boundary and after it (so does one
of a named loader that was made before the entry)
====================================================  ===========================================================

Where one begins right after a boundary, and the named loader's epoch goes on, it is an evaluation: what the code up to
the next batch moves is looked at (`between_steps`). What happens in ``guard.outside_step()``, between epochs, in whole
inside of one step, or inside of a data set is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from mindx_elastic.data import FunctionLoader, ReplayLoader
from mindx_elastic.data.iteration import Iteration, at_unfollowed
from mindx_elastic.data.random_streams import SeededDataset
from mindx_elastic.data.track import fetching
from mindx_elastic.guard.loops.followed_loader import SelfPositionedLoader
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["LoaderWatch"]

_BEGAN, _KEPT = "_mindx_began", "_mindx_kept"
_NAME_IT = (
    "Make it once, before the guard, and write Guard(loader=loader, ...), or Guard(loader=[first, second], ...) for "
    'several; for one that is made in each round, one over a data set that changes (stateful={"indices": indices} for '
    "its list); for an evaluation, `with guard.outside_step():` around it. Make iterators in the block, after `with "
    "guard:`"
)


class LoaderWatch:
    """One per guard. `at_boundary` belongs to the training thread; what a DataLoader gives is seen in any thread."""

    def __init__(
        self,
        unmanaged: Unmanaged,
        is_right_after_boundary: Callable[[], bool],
        *,
        kept: Sequence[SelfPositionedLoader],
        has_named: bool,
    ) -> None:
        """`is_right_after_boundary`: whether the first named loader, in mid-epoch, has given no batch since. `kept`:
        DataLoaders that the guard keeps by their own state."""
        self._unmanaged, self._kept = unmanaged, kept
        self._is_right_after_boundary = is_right_after_boundary
        self._has_named = has_named
        self.at_evaluation: Callable[[], None] = lambda: None
        """Called in the training thread when an evaluation begins right after a boundary, in mid-epoch."""
        self._thread = threading.get_ident()
        self.num_boundaries = 0
        """Counted by the loaders, without a call."""
        self.crossing = ""
        """Steps use batches of a loader that is not kept, in words."""
        self.is_outside = self.ends_epoch = False
        """`ends_epoch`: the last boundary ends an epoch that is a number of steps, whatever the loaders say."""
        self._active = False

    def enter(self, stack: ExitStack) -> None:
        """Put the hooks in; `stack` takes them out."""
        stack.callback(self._leave)
        self._active = True
        at_unfollowed.append(self._see_ours)
        kind: Any = _BaseDataLoaderIter
        self._originals = {name: getattr(kind, name) for name in ("__init__", "__next__", "_reset")}
        first, following, again = self._originals.values()

        def made(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            first(iterator, loader, *args, **kwargs)
            for kept in self._kept if self._active else ():
                if kept.loader is loader:
                    iterator.__dict__[_KEPT] = kept
                    kept.begin_iteration()

        def give(iterator: Any) -> Any:
            if self._active and threading.get_ident() not in fetching and not self.is_outside:
                self._see(iterator)
            batch = following(iterator)
            if (kept := iterator.__dict__.get(_KEPT)) is not None:
                kept.hand_out()
            return batch

        def reset(iterator: Any, *args: Any, **kwargs: Any) -> None:
            iterator.__dict__.pop(_BEGAN, None)  # persistent workers: another pass
            again(iterator, *args, **kwargs)

        self._hooks = {"__init__": made, "__next__": give, "_reset": reset}
        for name, hook in self._hooks.items():
            setattr(kind, name, hook)

    def _leave(self) -> None:
        self._active = False
        if self._see_ours in at_unfollowed:
            at_unfollowed.remove(self._see_ours)
        for name, hook in getattr(self, "_hooks", {}).items():
            if _BaseDataLoaderIter.__dict__.get(name) is hook:
                setattr(_BaseDataLoaderIter, name, self._originals[name])

    def _see(self, iterator: Any) -> None:
        """`iterator` is asked for a batch."""
        state = iterator.__dict__
        if isinstance(iterator, Iteration):
            loader = iterator.loader()
            if loader is not None and not loader._has_ends:  # a new iterator goes on
                state = loader.__dict__
        by, began = state.get(_BEGAN, (None, 0))
        if by is not self:
            state[_BEGAN] = self, self.num_boundaries
            self._see_first()
        elif began != self.num_boundaries and state.get(_KEPT) is None and not self.crossing:
            already = "next to the named ones" if self._has_named else "and no loader is named"
            self.crossing = f"steps use batches of {_describe(iterator)}, {already}: its position is not kept"

    def _see_ours(self, iteration: Iteration) -> None:
        """A loader of ours that no guard follows is asked for a batch."""
        if self._active and not self.is_outside:
            self._see(iteration)

    def _see_first(self) -> None:
        is_between = bool(self.num_boundaries) and not self.ends_epoch and threading.get_ident() == self._thread
        if is_between and self._is_right_after_boundary():
            self.at_evaluation()

    def tell_crossing(self) -> None:
        """A step has ended, and there is `crossing`."""
        crossing, self.crossing = self.crossing, ""
        self._unmanaged.certain(crossing, _NAME_IT)


def _describe(iterator: Any) -> str:
    loader = iterator.loader() if isinstance(iterator, Iteration) else None
    kind = "a DataLoader" if loader is None else f"a {type(loader).__name__}"
    if isinstance(loader, FunctionLoader):
        return f"{kind} of {getattr(loader.function, '__name__', 'a function')}()"
    source = loader.loader if isinstance(loader, ReplayLoader) else loader
    dataset = iterator._dataset if loader is None else getattr(source, "dataset", source)
    return f"{kind} over {type(dataset.wrapped if isinstance(dataset, SeededDataset) else dataset).__name__}"
