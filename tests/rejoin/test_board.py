"""The notes of a recovery in the job's store."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from mindx_elastic.agreement.sealed import NotOursError
from mindx_elastic.rejoin.board import Board


def board(store: Any, writer: int = 0, *, key: bytes | None = None, scope: str = "0/1") -> Board:
    return Board(store, key=key, scope=scope, writer=writer)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


@pytest.mark.parametrize("key", [None, b"secret"])
def test_the_first_note_counts(store: Any, key: bytes | None) -> None:
    first, second = board(store, 0, key=key), board(store, 1, key=key)
    assert first.write("1/out/1", {"dead": True}) == {"dead": True}
    assert second.write("1/out/1", {"step": 7}) == {"dead": True}
    assert second.read(["1/out/1", "1/out/2"]) == {"1/out/1": {"dead": True}}


def test_all_are_waited_for(store: Any) -> None:
    one = board(store)
    one.write("1/a", {"n": 1})
    assert one.wait(["1/a", "1/b"], 0.05) is None
    thread = threading.Timer(0.05, lambda: board(store, 1).write("1/b", {"n": 2}))
    thread.start()
    assert one.wait(["1/a", "1/b"], 30.0) == {"1/a": {"n": 1}, "1/b": {"n": 2}}
    thread.join()


@pytest.mark.parametrize(
    "other",
    [{"key": b"another"}, {"key": None}, {"key": b"secret", "scope": "1/1"}],
    ids=["key", "unsealed", "attempt"],
)
def test_a_note_of_another_job_is_refused(store: Any, other: dict[str, Any]) -> None:
    """Nor does a sealed one count in another place."""
    sealed = board(store, 0, key=b"secret")
    board(store, 1, **other).write("1/out/1", {"dead": True})
    sealed.write("1/out/2", {"dead": True})
    store.set("1/out/3", store.get("1/out/2"))
    for key in ("1/out/1", "1/out/3"):
        with pytest.raises(NotOursError):
            sealed.read([key])


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "{" * 100_000, "x" * (1 << 21)])
def test_what_makes_no_sense_is_refused(store: Any, text: str) -> None:
    store.set("1/plan", text)
    with pytest.raises(NotOursError):
        board(store).read(["1/plan"])
