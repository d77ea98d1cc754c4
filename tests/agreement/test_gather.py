"""Roll calls: all hear all, or all fail together, wherever one of them fails."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from mindx_elastic import errors
from mindx_elastic.agreement import gather as module
from mindx_elastic.agreement.gather import Merged, _error_of, all_or_none
from mindx_elastic.errors import (
    MismatchError,
    PeerStartError,
    UnsupportedStateError,
    UntrustedMessageError,
    UsageError,
)
from tests.start.shared_store import Board, BoardExchange, on_all_ranks


def meetings(*names: str, broken: Any = None, rank: int = 1, at: int = 0) -> Any:
    """Work of one rank: it meets the others under each name; `rank` raises `broken` before the meeting number `at`."""

    def work(mine: int, exchange: BoardExchange) -> list[Any]:
        heard = []
        for number, name in enumerate(names):
            if broken is not None and (mine, number) == (rank, at):
                raise broken
            answer = exchange.gather(name, f"{name} of {mine}", Merged)
            heard.append(answer.common)
        return heard

    return work


def test_an_answer_has_a_part_for_each_rank_and_parts_to_ask_for() -> None:
    def merge(said: list[int]) -> Merged:
        return Merged(sum(said), own=[each * 10 for each in said], more={"7": [1, 2], "8": {"a": None}})

    def work(rank: int, exchange: BoardExchange) -> tuple[Any, ...]:
        answer = exchange.gather("numbers", rank + 1, merge)
        return answer.common, answer.own, answer.more(["8", "7"])

    found = on_all_ranks(3, work)
    assert list(found) == [(6, own, [{"a": None}, [1, 2]]) for own in (10, 20, 30)]


def test_a_false_bell_does_not_end_the_wait() -> None:
    """Whoever reaches the store may ring; rank 0 looks whether all have spoken."""
    board = Board(2)
    board.values["start/round0/bell"] = "1"
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(meetings("a")(0, BoardExchange(board, 0))))
    first.start()
    meetings("a")(1, BoardExchange(board, 1))
    first.join(60)
    assert found == [[["a of 0", "a of 1"]]]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MismatchError("the model has changed"), MismatchError, "rank 1: the model has changed"),
        (UnsupportedStateError("x.y", "sparse"), UnsupportedStateError, "rank 1: x.y: sparse"),
        (MemoryError("no room"), PeerStartError, "rank 1 could not start: MemoryError: no room"),
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


def test_ranks_at_different_points_are_told_apart() -> None:
    def work(rank: int, exchange: BoardExchange) -> None:
        meetings("mirror" if rank else "layout")(rank, exchange)

    found = on_all_ranks(2, work)
    assert all("rank 1 is at 'mirror' of its start and rank 0 at 'layout'" in str(each) for each in found)
    assert all(isinstance(each, UsageError) for each in found)


def test_rank_0_stays_until_all_have_read_what_its_merge_failed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under env:// its process hosts the store, and the launcher ends the others when it leaves."""
    monkeypatch.setattr(module, "_HEARD_S", 600.0)
    board = Board(3)
    others = [BoardExchange(board, rank) for rank in (1, 2)]
    raised: list[BaseException] = []

    def preside() -> None:
        exchange = BoardExchange(board, 0)
        try:
            with all_or_none(exchange):
                exchange.gather("plan", 0, lambda said: Merged(said[17]))
        except Exception as error:
            raised.append(error)

    for exchange in others:
        exchange.say("plan", exchange.rank)
    thread = threading.Thread(target=preside, daemon=True)
    thread.start()
    with board.changed:
        assert board.changed.wait_for(lambda: "start/round0/answer" in board.values, 60)
    for exchange in others:
        thread.join(0.1)
        assert thread.is_alive(), f"rank 0 has left, and rank {exchange.rank} has not read its error"
        with pytest.raises(PeerStartError, match="rank 0 could not start: IndexError"):
            exchange.hear("plan")
    thread.join(60)
    assert not thread.is_alive() and isinstance(raised[0], IndexError)


def leave_in_the_wait(exchange: Any, name: str) -> None:
    """As a Ctrl-C does it while the rank waits for the answer."""

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_HEARD_S", 0.05)
        patch.setattr(exchange, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt), all_or_none(exchange):
            exchange.hear(name)


def test_a_rank_that_leaves_in_its_wait_when_the_answer_is_there_takes_the_next_one() -> None:
    """The others have what they need of this meeting, and would wait for this rank in the next one."""
    board = Board(3)
    ranks = [BoardExchange(board, rank) for rank in range(3)]
    for exchange in ranks:
        exchange.say("a", exchange.rank)
    ranks[0].preside("a", Merged)
    leave_in_the_wait(ranks[1], "a")
    for rank in (2, 0):
        assert ranks[rank].hear("a").common == [0, 1, 2]
        with pytest.raises(PeerStartError, match=r"^rank 1 could not start: KeyboardInterrupt$"):
            ranks[rank].gather("b", rank, Merged, timeout_s=60.0)


def test_errors_of_the_work_of_a_part_are_not_taken_for_a_strangers_message() -> None:
    error = KeyError("odd")

    class Works(module.Part):
        name = "work"
        only_decodes = False

        def merge(self, said: Any) -> Merged:
            raise error

    class Decodes(Works):
        only_decodes = True

    def met(part: module.Part) -> Any:
        return on_all_ranks(2, lambda rank, exchange: module.meet(exchange, "plan", [part]))

    own, other = met(Works())
    assert own is error
    assert isinstance(other, PeerStartError) and other.cause.startswith("KeyError")
    for found in met(Decodes()):
        assert isinstance(found, UntrustedMessageError), "what it decodes was written by somebody"


def test_an_exchange_that_is_gone_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise ConnectionError("the store")

    exchange = BoardExchange(Board(1), 0)
    monkeypatch.setattr(exchange, "_write_first", gone)
    with pytest.raises(ValueError, match="mine"), all_or_none(exchange):
        raise ValueError("mine")


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", json.dumps(["SystemExit", "0"]), json.dumps(["GracefulExit", 0]), json.dumps([[], {}])],
)
def test_what_others_write_is_at_most_a_message(text: str) -> None:
    """Anybody on the network may write into the store."""
    board = Board(2)
    board.values["start/round0/answer"] = f"!{text}"
    with pytest.raises(PeerStartError, match="could not start"):
        meetings("a")(1, BoardExchange(board, 1))


@pytest.mark.parametrize(("absent", "text"), [(2, "rank 2 did not come to 'listing'"), (0, "for rank 0 at 'listing'")])
def test_who_does_not_come_is_named_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, absent: int, text: str
) -> None:
    """And told while it is waited for: a job whose rank 0 alone has a guard stood still without a word."""
    monkeypatch.setattr(module, "_QUIET_S", 0.05)
    monkeypatch.setattr(module, "_ANSWER_S", 0.2 if absent == 0 else 60.0)

    def work(rank: int, exchange: BoardExchange) -> None:
        if rank != absent:
            exchange.gather("listing", "", lambda said: Merged(None), timeout_s=0.2)

    found = on_all_ranks(3, work)
    for rank in {0, 1, 2} - {absent}:
        assert text in str(found[rank])
    assert not absent or f"still waiting for rank {absent}: every rank has to enter its guard" in caplog.text


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_every_error_of_one_rank_can_be_raised_on_the_others(name: str) -> None:
    found = _error_of(json.dumps([3, name, "no room for it"]))
    assert isinstance(found, errors.MindxError) and "rank 3" in str(found) and "no room for it" in str(found)
    kind = getattr(errors, name)
    if isinstance(kind, type) and issubclass(kind, errors.CheckpointError | errors.UsageError):
        assert type(found) is kind
