"""A guard's part in recoveries in place, without other ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError
from mindx_elastic.guard import running
from mindx_elastic.guard.guard import Guard
from mindx_elastic.guard.running import InPlaceGuard, _end_frames, tell_of_block
from mindx_elastic.rejoin import member
from mindx_elastic.rejoin.before_call import ObjectsBeforeCall
from mindx_elastic.rejoin.member import GuardEntry, Member


class Others:
    """In place of a member: whether the other ranks are out of their loops."""

    def __init__(self, *, are_out: bool) -> None:
        self.are_out = are_out

    def others_are_out(self) -> bool:
        return self.are_out


class NewProcess:
    """Of a dead rank; notes when it has met the others."""

    def __init__(self, directory: Path, *, are_out: bool) -> None:
        self.directory = directory
        self.found: list[bool] = []
        """At each meeting: whether the guard's directory was there."""
        self.place = InPlaceGuard(cast("Member", Others(are_out=are_out)), None, ObjectsBeforeCall({}), join=self.join)

    def join(self) -> GuardEntry:
        self.found.append(self.directory.exists())
        nothing: Any = None
        return GuardEntry(generation=1, verdict=nothing, where=nothing, live=None)


def guard_in(directory: Path, new: NewProcess) -> Guard:
    guard = Guard(directory=directory, model=nn.Linear(1, 1))
    guard.take_place(new.place)
    return guard


@pytest.mark.parametrize("are_out", [False, True])
def test_a_new_process_prepares_before_it_meets_the_others_unless_they_wait(tmp_path: Path, are_out: bool) -> None:
    new = NewProcess(tmp_path / "checkpoints", are_out=are_out)
    guard = guard_in(new.directory, new)
    with pytest.raises(AttributeError):  # there is nothing to go on from here
        guard.open()
    assert new.found == [not are_out]


def test_what_goes_wrong_ahead_is_raised_when_the_others_can_hear_of_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    new = NewProcess(file, are_out=False)
    with pytest.raises(UsageError, match="is a file"):
        guard_in(file, new).open()
    assert new.found == [True]


@pytest.mark.parametrize(
    ("is_layered", "told"), [(False, "make the loop a function"), (True, "a trainer keeps the loop")]
)
def test_what_is_told_of_a_guard_that_cannot_recover_in_place_fits_its_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_layered: bool, told: str
) -> None:
    monkeypatch.setattr(running, "_is_running", False)
    monkeypatch.setenv("MINDX_RECOVER", "in-place")
    monkeypatch.setattr(member, "_told", set())
    monkeypatch.setattr("mindx_elastic.guard.running.AgentInfo.from_env", object)
    tell_of_block(RankInfo(rank=0, world_size=2), is_layered=is_layered)
    assert [told in each.message for each in caplog.records] == [True]


def closing(closed: list[str]) -> Iterator[int]:
    try:
        yield 1
    finally:
        closed.append("closed")


def train(closed: list[str], *, looks: bool) -> None:
    batches = closing(closed)
    for _ in batches:
        if looks:
            assert "batches" in sys._getframe().f_locals
        raise RuntimeError("a rank has died")


@pytest.mark.parametrize("looks", [False, True])
def test_a_generator_ends_before_the_connections_are_new(looks: bool) -> None:
    closed: list[str] = []
    with pytest.raises(RuntimeError, match="died") as caught:
        train(closed, looks=looks)
    assert not closed
    _end_frames(caught.value)
    assert closed == ["closed"]
