"""Makes a loader that the program goes on iterating behave as its resumable one, for a while.

Programs hold on to their DataLoader: they iterate it, ask its length, hand it on. So the object stays, and its
*class* is exchanged for a subclass made for it, whose ``iter``, ``len`` and `set_epoch` are those of the resumable
loader; attributes, ``isinstance`` and ``repr`` are as before. Copies and pickles of it are plain again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from mindx_elastic.core.looks import asked
from mindx_elastic.data.function import FunctionLoader
from mindx_elastic.data.loader import ResumableLoader, from_loader, stock_order
from mindx_elastic.data.permutation import mix
from mindx_elastic.data.replay import ReplayLoader, is_torchdata
from mindx_elastic.data.sampler import rank_and_world_size
from mindx_elastic.errors import UsageError

__all__ = ["Adoption"]

_KEY = "_mindx_resumable"
_MASK = (1 << 63) - 1


class Adoption:
    """A DataLoader and the resumable loader that stands in for it between `begin` and `end`.

    Unlike `from_loader` by itself, it changes neither which samples a rank sees nor how many batches there are: without
    a DistributedSampler each rank goes through the whole data set, as before. The order is chosen by the seed that the
    program gave to torch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if _KEY in vars(loader):
            raise UsageError("this DataLoader already belongs to a guard that is entered")
        self.loader = loader
        self._kind = type(loader)
        resumable = from_loader(loader)
        assert not isinstance(resumable, FunctionLoader)
        self.resumable = resumable
        self._own_seed = True
        """The order follows from torch's seed, which may be another one in the next process."""
        if isinstance(self.resumable, ResumableLoader):
            self.resumable._stand_for(loader)
            sampler = self.resumable._sampler
            given = not is_torchdata(type(loader.sampler)) and asked(loader.sampler, "generator") is not None
            self._own_seed = not (given or asked(loader.sampler, "num_replicas") is not None)
            if asked(loader.sampler, "num_replicas") is None:
                sampler.ranks = partial(rank_and_world_size, 0, 1)
            else:  # programs rely on batches of equal size (losses over an `all_gather`)
                sampler.filled_rounds = not sampler.whole_rounds

    def begin(self) -> None:
        if self._own_seed:
            self._seed(torch.initial_seed() & _MASK)
        self.loader.__dict__[_KEY] = self.resumable
        object.__setattr__(self.loader, "__class__", _adopted(self._kind, self.resumable))

    def end(self) -> None:
        """The loader is as it was. Its workers have ended."""
        self.loader.__dict__.pop(_KEY, None)
        object.__setattr__(self.loader, "__class__", self._kind)
        self.resumable.shutdown()

    def take_over(self) -> None:
        """What the program has set on its loader and on its samplers acts from the next iteration on."""
        if isinstance(self.resumable, ResumableLoader):
            _take_over(self.loader, self.resumable)

    def take_seed(self, state: Any) -> None:
        """Go on with the seed of the run that wrote `state`."""
        if self._own_seed and isinstance(state.get("seed"), int):
            self._seed(state["seed"])

    def _seed(self, seed: int) -> None:
        self.resumable.seed = seed
        self.resumable._settings = None

    def describe(self) -> str:
        """How its order arises, for people."""
        dataset = type(self.loader.dataset).__name__
        what = f"the {self._kind.__name__} over {dataset}"
        loader = self.resumable
        if isinstance(loader, ReplayLoader):
            skipped = "loaded and dropped" if loader._skipper is None else "skipped"
            return f"{what} keeps its own order; after a resume its epoch begins again: earlier batches are {skipped}"
        sampler = loader._sampler
        if sampler.shuffle:
            order = f"is shuffled in each epoch, by (seed {loader.seed}, epoch) and not in torch's order"
        else:
            order = "goes through its data set in order"
        if asked(self.loader.sampler, "num_replicas") is not None:
            order += "; its DistributedSampler says which part each rank gets, and need not be told the epoch"
        return f"{what} {order}; what is drawn for a batch is a function of (seed, epoch, place)"


def _adopted(kind: type[DataLoader[Any]], resumable: ResumableLoader | ReplayLoader) -> type[DataLoader[Any]]:
    class Adopted(kind):  # type: ignore[valid-type,misc]
        def __iter__(self) -> Iterator[Any]:
            stand_in = self.__dict__[_KEY]
            if isinstance(stand_in, ResumableLoader):
                _take_over(self, stand_in)
            return iter(stand_in)

        def set_epoch(self, epoch: int) -> None:
            self.__dict__[_KEY].set_epoch(epoch)

        def state_dict(self) -> dict[str, Any]:
            return self.__dict__[_KEY].state_dict()  # type: ignore[no-any-return]

        def load_state_dict(self, state: Any) -> None:
            self.__dict__[_KEY].load_state_dict(state)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _plain, (kind, {name: value for name, value in self.__dict__.items() if name != _KEY})

    if isinstance(resumable, ResumableLoader):
        Adopted.__len__ = lambda self: len(self.__dict__[_KEY])
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Adopted, name, getattr(kind, name))
    return Adopted


def _take_over(loader: DataLoader[Any], resumable: ResumableLoader) -> None:
    order = stock_order(loader)
    if order is None:
        raise UsageError(
            "the sampler of this DataLoader was exchanged, or draws otherwise, since the guard was entered: make the "
            "loader with that sampler before the guard (one loader for each order, Guard(loader=[first, second], ...))"
        )
    if asked(loader.sampler, "num_replicas") is not None:
        seed = 0 if order["own_seed"] is None else mix(0, order["own_seed"])
        if seed != resumable.seed:
            resumable.seed = seed
            resumable._settings = None


def _plain(kind: type[DataLoader[Any]], attributes: dict[str, Any]) -> DataLoader[Any]:
    """A copy of an adopted loader that has its own class again."""
    loader = kind.__new__(kind)
    loader.__dict__.update(attributes)
    return loader
