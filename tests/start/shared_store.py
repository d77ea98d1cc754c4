"""Several ranks in one process, a thread each, over a board instead of a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Gathering, Store, all_or_none
from mindx_elastic.agreement.sealed import Seal

__all__ = ["Board", "on_all_ranks"]

T = TypeVar("T")
_WAIT_S = 120.0


class Board:
    """What all ranks have written."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.changed = threading.Condition()


class BoardExchange(Gathering, Exchange):
    """The start-up half of an exchange; nothing else is needed here."""

    def __init__(self, board: Board, rank: int) -> None:
        Exchange.__init__(self)
        Gathering.__init__(self, cast(Store, None), Seal(None, "", rank), rank=rank, world_size=board.world_size)
        self.board, self._is_begun = board, True

    def _write(self, texts: Mapping[str, str]) -> None:
        with self.board.changed:
            twice = self.board.values.keys() & texts.keys()
            assert not twice, f"rank {self.rank} wrote {twice} twice"
            self.board.values.update(texts)
            self.board.changed.notify_all()

    def _write_first(self, key: str, text: str) -> str:
        with self.board.changed:
            found = self.board.values.setdefault(key, text)
            self.board.changed.notify_all()
            return found

    def _count(self, key: str, amount: int = 1) -> int:
        with self.board.changed:
            self.board.counts[key] = self.board.counts.get(key, 0) + amount
            return self.board.counts[key]

    def _ring(self, key: str) -> None:
        self._write_first(key, "1")

    def _wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        with self.board.changed:
            return self.board.changed.wait_for(
                lambda: all(k in self.board.values for k in keys), min(timeout_s, _WAIT_S)
            )

    def _read(self, keys: Sequence[str], authors: Sequence[int | None]) -> list[str]:
        with self.board.changed:
            return [self.board.values[key] for key in keys]

    def tell(self, name: str, value: str) -> bool:
        self._write({f"{name}/{self.rank}": value})
        return True

    def try_collect(self, name: str, ranks: Sequence[int] | None = None) -> list[str] | None:
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        return self._read(keys, keys) if self._wait(keys, 0.0) else None  # type: ignore[arg-type]


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
