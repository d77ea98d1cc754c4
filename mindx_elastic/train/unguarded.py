"""Stands in for the guard when no callback asks for a checkpoint: it counts, and touches neither disk nor signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from mindx_elastic.core.position import Position
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.policy import PeriodicPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GuardPort", "Unguarded"]


class GuardPort(Protocol):
    """The part of `mindx_elastic.Guard` that a training loop uses. Training thread only."""

    resumed_from_step: int | None
    resumed_path: Path | None

    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Any: ...

    @property
    def position(self) -> Position: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def epochs(self, num_epochs: int) -> Iterator[int]: ...
    def boundary(self) -> None: ...
    def finish_step(self, *, retake: bool = False) -> None: ...
    def poll(self) -> None: ...
    def outside_step(self) -> Any: ...
    def request_stop(self, reason: str, exit_code: int = 0) -> None: ...
    def dismiss_stop(self) -> None: ...
    def save_periodic(self, policy: PeriodicPolicy) -> bool: ...


class Unguarded:
    """A `GuardPort` that only counts."""

    resumed_from_step: int | None = None
    resumed_path: Path | None = None

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size
        self._step = self._epoch = self._step_in_epoch = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    @property
    def position(self) -> Position:
        try:
            length = len(self.loader)
        except (TypeError, NotImplementedError):
            length = 0
        return Position(self._step, self._epoch, self._step_in_epoch, length)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        for epoch in range(1, num_epochs + 1):
            self._epoch, self._step_in_epoch = epoch, 0
            self.loader.set_epoch(epoch)
            yield epoch

    def boundary(self) -> None:
        self._step += 1
        self._step_in_epoch += 1

    def finish_step(self, *, retake: bool = False) -> None:
        pass

    def poll(self) -> None:
        pass

    def dismiss_stop(self) -> None:
        pass

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        yield

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        raise UsageError(
            f"{reason}: not every rank has asked for the stop at this step, and without a checkpoint callback the "
            "ranks cannot agree on one; call request_stop() on every rank, or add ExceptionCheckpoint"
        )

    def save_periodic(self, policy: PeriodicPolicy) -> bool:
        return False
