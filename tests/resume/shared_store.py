"""Several ranks in one process, a thread each, over a board instead of a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mindx_elastic.agreement.exchange import LocalExchange
from mindx_elastic.agreement.gather import all_or_none

__all__ = ["Board", "on_all_ranks"]

T = TypeVar("T")
_WAIT_S = 120.0


class Board:
    """What all ranks have published."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values: dict[tuple[str, int], str] = {}
        self.changed = threading.Condition()


class BoardExchange(LocalExchange):
    """The start-up half of an exchange; nothing else is needed here."""

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__()
        self.board, self.rank = board, rank

    def publish(self, name: str, value: str) -> None:
        with self.board.changed:
            assert (name, self.rank) not in self.board.values, f"rank {self.rank} published {name} twice"
            self.board.values[name, self.rank] = value
            self.board.changed.notify_all()

    def try_collect(self, name: str) -> list[str] | None:
        with self.board.changed:
            keys = [(name, rank) for rank in range(self.board.world_size)]
            return [self.board.values[key] for key in keys] if all(key in self.board.values for key in keys) else None

    def collect(self, name: str, timeout_s: float) -> list[str]:
        keys = [(name, rank) for rank in range(self.board.world_size)]
        with self.board.changed:
            if not self.board.changed.wait_for(lambda: all(key in self.board.values for key in keys), _WAIT_S):
                raise TimeoutError(f"rank {self.rank} waited for {name!r}")
            return [self.board.values[key] for key in keys]


def on_all_ranks(world_size: int, work: Callable[[int, BoardExchange], T]) -> list[T | Exception]:
    """``work(rank, exchange)`` in a thread a rank; results or errors in rank order."""
    board = Board(world_size)
    results: dict[int, T | Exception] = {}

    def run(rank: int) -> None:
        try:
            exchange = BoardExchange(board, rank)
            with all_or_none(exchange):
                results[rank] = work(rank, exchange)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _WAIT_S)
    return [results[rank] for rank in range(world_size)]
