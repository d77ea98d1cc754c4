"""The loader for a function that makes a batch: ``get_batch()`` of character models, samplers of replay data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mindx_elastic.data.generators import find_generators
from mindx_elastic.data.iteration import CursorLoader, Opened
from mindx_elastic.data.permutation import mix
from mindx_elastic.data.position import whole_number
from mindx_elastic.data.random_streams import device_generators, seeded
from mindx_elastic.data.sampler import rank_and_world_size
from mindx_elastic.errors import UsageError

__all__ = ["FunctionLoader", "from_function"]

_BATCH = 8  # keeps its hashes apart


class FunctionLoader(CursorLoader):
    """Gives the batches that a function makes, and knows its position.

    The function draws from the global streams (Python's, numpy's, torch's on the CPU and on CUDA devices) and from
    generators that it refers to. For each call they are seeded with a hash of (seed, epoch, number of the batch,
    rank), and afterwards they are put back: so a batch may be fetched ahead, and a resumed run makes the same ones, at
    once and at any position. What else the function changes (a pointer into a file, a counter) is not seen.

    Args:
        function: called without arguments; returns the next batch, or raises StopIteration at an epoch's end.
        batches_per_epoch: None: an epoch without an end.
        seed: whole number. Ranks draw differently.
    """

    _form = "function"

    def __init__(self, function: Callable[[], Any], batches_per_epoch: int | None = None, *, seed: int = 0) -> None:
        if not callable(function):
            raise UsageError(f"from_function({function!r}): give a function that returns a batch")
        self.function = function
        self.batches_per_epoch = batches_per_epoch
        if batches_per_epoch is not None:
            self.batches_per_epoch = whole_number("batches_per_epoch", batches_per_epoch, low=1)
        self._has_ends = batches_per_epoch is not None
        self.seed = whole_number("seed", seed)
        self._set_up()

    def __len__(self) -> int:
        if self.batches_per_epoch is None:
            raise TypeError("this loader has no end; give from_function(..., batches_per_epoch=...)")
        return self.batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """See `ResumableLoader.set_epoch`. Without `batches_per_epoch` there is one epoch only: this does nothing."""
        if self._has_ends:
            self._cursor.set_epoch(whole_number("epoch", epoch, low=0))

    def __iter__(self) -> Iterator[Any]:
        cursor = self._cursor
        if not (self._has_ends or cursor.pending or cursor.finished):  # without an end, a new iterator goes on
            cursor.move_to(cursor.epoch, batch=cursor.batch)
        return super().__iter__()

    def _begin(self) -> Opened:
        cursor = self._cursor
        first, total, epoch = cursor.batch, self.batches_per_epoch, cursor.epoch
        if cursor.finished or total is None:
            left = 0 if cursor.finished else None
        else:
            left = max(0, total - first)
        batches = _Calls(self.function, partial(self._seed_of, epoch), first, left)
        return Opened(batches, lambda count: (0, left is not None and count >= left), self._announce)

    def _seed_of(self, epoch: int, number: int) -> int:
        return mix(self.seed, epoch, number, rank_and_world_size(None, None)[0], _BATCH)


class _Calls(Iterator[Any]):
    def __init__(
        self, function: Callable[[], Any], seed_of: Callable[[int], int], first: int, left: int | None
    ) -> None:
        self._function, self._seed_of, self._number, self._left = function, seed_of, first, left
        self._own: dict[str, Any] | None = None

    def __next__(self) -> Any:
        if self._left is not None:
            if self._left == 0:
                raise StopIteration
            self._left -= 1
        number, self._number = self._number, self._number + 1
        if self._own is None:
            self._own = find_generators([self._function])
        on_devices = device_generators()
        own = self._own | on_devices
        with seeded(self._seed_of(number), own):
            try:
                return self._function()
            finally:
                if not on_devices:  # the function may be what has brought them to life: as before it then
                    for generator in device_generators().values():
                        generator.manual_seed(generator.initial_seed())


def from_function(
    function: Callable[[], Any], batches_per_epoch: int | None = None, *, seed: int = 0
) -> FunctionLoader:
    """A loader of the batches that `function` makes; see `FunctionLoader`.

    ::

        def get_batch():
            at = torch.randint(len(data) - block, (batch_size,))
            return torch.stack([data[i : i + block] for i in at]), ...


        loader = mx.data.from_function(get_batch)
        with mx.Guard(model=model, optimizer=opt, loader=loader, directory="ckpt") as guard:
            batches = iter(loader)
            x, y = next(batches)
    """
    return FunctionLoader(function, batches_per_epoch, seed=seed)
