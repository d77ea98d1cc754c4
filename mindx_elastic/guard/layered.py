"""What layers above a guard call (`Model.train`, integrations of trainers), and what it says of the size of its job.

`serve_layer`, `expect_no_look_ahead` and `take_place` are for before the guard is entered.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Part
from mindx_elastic.config import RankInfo
from mindx_elastic.data.position import whole_number
from mindx_elastic.guard.fewer_ranks import FewerRanks
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.loops.loops import Loops
from mindx_elastic.guard.running import InPlaceGuard

__all__ = ["LayeredGuard"]


class LayeredGuard:
    """A guard of which a layer above keeps the loop."""

    _loops: Loops
    _loaders: Loaders
    _ranks: RankInfo
    _fewer: FewerRanks

    def __init__(self) -> None:
        self._more: Mapping[str, object] = {}
        self._kept: Sequence[object] = ()
        self._own: Mapping[str, object] = {}
        self._shared_exchange: Exchange | None = None
        self._last_parts: Sequence[Part] = ()
        self._place: InPlaceGuard | None = None  # in recoveries in place

    def serve_layer(
        self,
        variables: Mapping[str, Any],
        *,
        kept: Sequence[Any] = (),
        own: Mapping[str, Any] | None = None,
        has_tail: bool = False,
        has_short_epochs: bool = False,
        exchange: Exchange | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        """A layer keeps the loop. `variables`: objects of the program by the names that it knows; `kept`: those whose
        state the layer keeps; `own`: those that hang on these and have a state that no one keeps (callbacks of the
        program's own). `has_tail`: it has code at an epoch's end that may need the epoch's steps. `has_short_epochs`:
        its loop may leave an epoch before the loader's end, and leaves it there after a resume, too. `exchange`: over
        which the ranks meet, and which its owner closes after the guard (None: one of the guard's own); `parts`: what
        they tell each other when the state is back."""
        self._own = dict(own or {})
        self._more, self._kept = {**variables, **self._own}, tuple(kept)
        self._loops.tail.layer_waits, self._loops.is_layered = has_tail, True
        self._loaders.has_short_epochs = has_short_epochs
        self._shared_exchange, self._last_parts = exchange, parts

    def expect_no_look_ahead(self) -> None:
        """The layer's loop uses each batch before it fetches the next one."""
        self._loaders.may_fetch_ahead = False

    def take_place(self, place: InPlaceGuard | None) -> None:
        """See `guard.running`."""
        self._place = place

    def reach_resumed_step(self) -> None:
        """After the guard is entered: the host's loop is where the resumed run goes on, which need not be at a batch.
        What code has changed on the way there (random streams, objects) is put back; on a fresh start there is nothing
        to do."""
        self._loops.reach_resumed_step()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the guard that `open` has entered. `error`: the exception that has ended the training; None: it is
        done.

        With an error the last boundary is saved as the policies say, and the host raises the error again. Raises
        GracefulExit where the job is to stop, also without an error.
        """
        self.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    # --- the size of the job ---

    @property
    def ranks(self) -> RankInfo:
        """This process among all; known once the guard is entered."""
        return self._ranks

    @property
    def rank(self) -> int:
        """This process's rank; known once the guard is entered."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks; known once the guard is entered."""
        return self._ranks.world_size

    def accumulation(self, batches: int = 1) -> int:
        """Over how many batches this rank accumulates gradients for one update, where it is `batches` with all ranks.

        ::

            n = guard.accumulation()
            for i, (x, y) in guard.enumerate(loader, start=1):
                (loss_of(model(x), y) / n).backward()
                if i % n == 0:
                    opt.step()
                    opt.zero_grad()
                    guard.step_end()

        It is `batches`, except in a job that goes on with fewer ranks (``mindx-elastic run --min-nproc``): with half
        of them, twice as many. Such a job must ask.
        """
        return self._fewer.accumulation(whole_number("batches", batches, low=1))
