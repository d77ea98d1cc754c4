"""What one rank does in a recovery, with a board of its own and without connections to others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.errors import MismatchError
from mindx_elastic.rejoin import groups
from mindx_elastic.rejoin.board import Board
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.member import Host, Member, UnfitSpareError, join_job
from mindx_elastic.rejoin.protocol import Report


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


@pytest.fixture
def member(store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Member:
    made = Member(
        RejoinSettings(timeout_s=60.0),
        RankInfo(rank=1, world_size=2, local_rank=1),
        AgentInfo(folder=tmp_path, attempt=0),
    )
    monkeypatch.setattr(made, "_connection", lambda: store)
    made._host = LoneHost()
    return made


class LoneHost(Host):
    """Of a guard whose rank cannot go on for this reason; empty: it can."""

    problem = ""

    def __init__(self) -> None:
        def end(why: str) -> NoReturn:
            raise Ended(why)

        self.ddp, self.end, self.is_stopping = (), end, lambda: False

    def report(self) -> Report:
        return Report(rank=1, run_id="run", attempt=0, step=7, clean=True, groups="g", problem=self.problem)


def notes_of(store: Any) -> Board:
    return Board(store, key=None, scope="0/1", writer=2)


def test_a_rank_that_was_taken_for_dead_ends_and_calls_nothing_off(store: Any, member: Member) -> None:
    """It had been stopped for a while: a new process has its place."""
    board = notes_of(store)
    board.write("1/plan", {"generation": 1})
    board.write("1/out/1", {"dead": True})
    board.write("1/out/0", Report(rank=0, run_id="run", attempt=0, step=7, clean=True, groups="g").to_json())
    with pytest.raises(Ended, match="rank 1 was taken for dead"):
        member.leave()
    assert not board.read(["1/refusal"])


def test_a_living_rank_says_why_it_cannot_go_on(store: Any, member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    board = notes_of(store)
    board.write("1/plan", {"generation": 1})
    board.write("1/out/0", {"dead": True})
    monkeypatch.setattr(LoneHost, "problem", "it has compiled")
    with pytest.raises(RejoinFailed, match="it has compiled"):
        member.leave()
    assert board.read(["1/refusal"]) == {
        "1/refusal": {"rank": 1, "refusal": "rank 1: it has compiled"},
    }


def died(store: Any, rank: int) -> None:
    """`rank` has, and the other one reports in which order the gradients of its model arrive."""
    living = Report(rank=1 - rank, run_id="run", attempt=0, step=7, clean=True, groups="g", orders={"model": [1, 0]})
    board = notes_of(store)
    board.write("1/plan", {"generation": 1})
    board.write(f"1/out/{1 - rank}", living.to_json())
    board.write(f"1/out/{rank}", {"dead": True})


def refuse(*_: Any) -> NoReturn:
    raise RejoinFailed("this far")


@pytest.mark.parametrize("problem", ["its buckets are not laid out", ""])
def test_a_survivor_connects_once_its_ddp_is_as_that_of_a_new_process(
    store: Any, member: Member, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    died(store, 0)
    monkeypatch.setattr(groups, "reset_ddp", lambda ddp: problem)
    monkeypatch.setattr(groups, "connect", refuse)
    with pytest.raises(RejoinFailed, match=problem or "this far"):
        member.leave()


@pytest.mark.parametrize(
    ("laid_out", "problem", "error"),
    [
        ({}, "it cannot be laid out", RejoinFailed("it cannot be laid out")),
        ({}, "", RejoinFailed("this far")),
        ({"model": [1, 0]}, "it is not laid out again", RejoinFailed("this far")),
        ({"model": [0, 1]}, "", UnfitSpareError("model arrive in another order")),
    ],
)
def test_a_new_process_lays_its_ddp_out_as_the_others_have_unless_it_was_when_it_was_forked(
    store: Any, member: Member, monkeypatch: pytest.MonkeyPatch, laid_out: Any, problem: str, error: Exception
) -> None:
    died(store, 1)
    member.generation, member.laid_out = 1, laid_out
    monkeypatch.setattr(groups, "rebuild_buckets", lambda name, module, order: problem * (order == [1, 0]))
    with pytest.raises(type(error), match=str(error)):
        member.join([("model", None)], refuse)  # type: ignore[list-item]


def test_a_new_process_that_cannot_join_says_so_to_all() -> None:
    said: list[object] = []
    member: Any = SimpleNamespace(
        generation=1, join=lambda ddp, end_setup: "entry", refuse=lambda *why: said.append(why)
    )
    assert join_job(member, []) == "entry"  # type: ignore[comparison-overlap]
    member.join = refuse
    with pytest.raises(MismatchError, match="cannot take a dead rank's place: this far"):
        join_job(member, [])
    assert said == [(1, "this far")]
