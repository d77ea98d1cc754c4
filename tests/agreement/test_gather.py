"""Roll calls: all hear all, or all fail together, wherever one of them fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindx_elastic import errors
from mindx_elastic.agreement import gather as module
from mindx_elastic.agreement.exchange import LocalExchange
from mindx_elastic.agreement.gather import _error_of, all_or_none
from mindx_elastic.errors import (
    CheckpointError,
    MismatchError,
    PeerStartError,
    UnsafeDirectoryError,
    UnsupportedStateError,
    UsageError,
)
from tests.resume.shared_store import Board, BoardExchange, on_all_ranks


def meetings(*names: str, broken: Any = None, rank: int = 1, at: int = 0) -> Any:
    """Work of one rank: it meets the others under each name; `rank` raises `broken` before the meeting number `at`."""

    def work(mine: int, exchange: BoardExchange) -> list[list[str]]:
        heard = []
        for number, name in enumerate(names):
            if broken is not None and (mine, number) == (rank, at):
                raise broken
            heard.append(exchange.gather(name, f"{name} of {mine}", 5.0))
        return heard

    return work


def test_everybody_hears_everybody_in_rank_order() -> None:
    expected = [["a of 0", "a of 1", "a of 2"], ["b of 0", "b of 1", "b of 2"]]
    assert on_all_ranks(3, meetings("a", "b")) == [expected] * 3


def test_one_name_may_be_used_twice_and_values_have_lines() -> None:
    def work(rank: int, exchange: BoardExchange) -> list[str]:
        return exchange.gather("read", "", 5.0) + exchange.gather("read", f"{rank}\n\nmore\n", 5.0)

    assert on_all_ranks(2, work) == [["", "", "0\n\nmore\n", "1\n\nmore\n"]] * 2


def test_alone_there_is_nobody_to_wait_for() -> None:
    exchange = LocalExchange()
    assert exchange.gather("a", "x", 0.0) == ["x"]
    with pytest.raises(ValueError, match="mine"), all_or_none(exchange):
        raise ValueError("mine")


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MismatchError("the model has changed"), MismatchError, "rank 1: the model has changed"),
        (UnsafeDirectoryError("anybody writes there"), UnsafeDirectoryError, "rank 1: anybody writes there"),
        (UsageError("no"), UsageError, "rank 1: no"),
        (UnsupportedStateError("x.y", "sparse"), UnsupportedStateError, "rank 1: x.y: sparse"),
        (MemoryError("no room"), PeerStartError, "rank 1 could not start: MemoryError: no room"),
        (KeyboardInterrupt(), PeerStartError, "rank 1 could not start: KeyboardInterrupt"),
        (SystemExit(3), PeerStartError, "rank 1 could not start: SystemExit: 3"),
    ],
)
def test_an_error_of_one_rank_is_everybodys(error: BaseException, kind: type[Exception], text: str, at: int) -> None:
    board = Board(3)

    def one(rank: int) -> Any:
        exchange = BoardExchange(board, rank)
        try:
            with all_or_none(exchange):
                return meetings("a", "b", "c", broken=error, at=at)(rank, exchange)
        except BaseException as raised:
            return raised

    found = on_all_ranks(3, lambda rank, exchange: one(rank))
    assert found[1] is error
    for each in (found[0], found[2]):
        assert type(each) is kind and str(each) == text


def test_two_that_fail_at_once_keep_their_own_errors() -> None:
    def work(rank: int, exchange: BoardExchange) -> None:
        exchange.gather("a", "", 5.0)
        if rank < 2:
            raise ValueError(f"of {rank}")
        exchange.gather("b", "", 5.0)

    found = on_all_ranks(3, work)
    assert [str(each) for each in found[:2]] == ["of 0", "of 1"]
    assert isinstance(found[2], PeerStartError) and found[2].rank == 0


def test_ranks_at_different_points_are_told_apart() -> None:
    def work(rank: int, exchange: BoardExchange) -> None:
        exchange.gather("mirror" if rank else "layout", "", 5.0)

    found = on_all_ranks(2, work)
    assert "rank 1 is at 'mirror' of its start and this rank at 'layout'" in str(found[0])
    assert all(isinstance(each, UsageError) for each in found)


def test_a_failed_rank_does_not_wait_long_for_those_who_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARD_S", 0.05)
    exchange = BoardExchange(Board(2), 0)
    with pytest.raises(ValueError, match="nobody"), all_or_none(exchange):
        raise ValueError("nobody else is here yet")
    assert exchange.board.values["round0", 0].startswith("!\n")


def test_an_exchange_that_is_gone_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise ConnectionError("the store")

    exchange = LocalExchange()
    monkeypatch.setattr(exchange, "publish", gone)
    with pytest.raises(ValueError, match="mine"), all_or_none(exchange):
        raise ValueError("mine")


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", json.dumps(["SystemExit", "0"]), json.dumps(["GracefulExit", 0]), json.dumps([[], {}])],
)
def test_what_others_write_is_at_most_a_message(text: str) -> None:
    """Anybody on the network may write into the store."""
    board = Board(2)
    board.values["round0", 1] = f"!\n{text}"
    with pytest.raises(PeerStartError, match="rank 1"):
        BoardExchange(board, 0).gather("a", "", 1.0)


def test_control_characters_of_others_are_not_printed() -> None:
    board = Board(2)
    board.values["round0", 1] = "!\n" + json.dumps(["CheckpointError", "\x1b[2Jgone" + "x" * 10_000])
    with pytest.raises(CheckpointError) as caught:
        BoardExchange(board, 0).gather("a", "", 1.0)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 5000


def test_who_does_not_come_is_named_by_the_meeting() -> None:
    class Slow(LocalExchange):
        def collect(self, name: str, timeout_s: float) -> list[str]:
            raise TimeoutError(f"waited for every rank's {name!r}")

    with pytest.raises(TimeoutError, match="every rank's 'listing'"):
        Slow().gather("listing", "", 1.0)


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_every_error_of_one_rank_can_be_raised_on_the_others(name: str) -> None:
    found = _error_of(3, json.dumps([name, "no room for it"]))
    assert isinstance(found, errors.MindxError) and "rank 3" in str(found) and "no room for it" in str(found)
    kind = getattr(errors, name)
    if isinstance(kind, type) and issubclass(kind, errors.CheckpointError | errors.UsageError):
        assert type(found) is kind
