"""``guard.enumerate(loader)``: the numbers of its batches go on from the true place in the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindx_elastic.core.looks import has_method
from mindx_elastic.errors import UsageError

__all__ = ["NumberedBatches"]


class NumberedBatches(Iterator[tuple[int, Any]]):
    """The batches of a loader with their numbers in the epoch. It has the loader's length, which what is around it asks
    for: a bar, torchvision's `MetricLogger`."""

    def __init__(self, loader: Iterable[Any], start: int) -> None:
        self._loader, self._start = loader, start
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __next__(self) -> tuple[int, Any]:
        if self._batches is None:
            self._batches = iter(self._loader)
            self._number = _batches_done(self._loader) + self._start - 1
        batch = next(self._batches)
        self._number += 1
        return self._number, batch


def _batches_done(loader: Any) -> int:
    """Batches of its epoch that an iteration of `loader` that has just begun leaves out. Raises UsageError."""
    state = loader.state_dict() if has_method(loader, "state_dict") else None
    if not isinstance(state, Mapping) or not isinstance(state.get("batch"), int):
        raise UsageError(
            f"guard.enumerate({type(loader).__name__}): it cannot tell where it stands in its epoch; name the loader "
            "in Guard(loader=...) and give it to guard.enumerate() itself, tqdm and the like around that"
        )
    return int(state["batch"])
