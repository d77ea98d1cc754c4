"""The messages between workers and scheduler: what comes over a socket may be anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.cluster.wire import MAX_REQUEST_BYTES, Line, WireError, farewell, registration

KEY = b"a key that only the job has"
GOOD: dict[str, Any] = {
    "op": "register",
    "node_id": "0",
    "incarnation": "a" * 32,
    "host": "h",
    "pid": 1,
    "started": "7",
    "space": "b/pid:[1]",
    "size": 2,
    "recovery": True,
    "generation": -1,
    "joined": 0,
    "job": "",
}


def pair(key: bytes | None = None, other: bytes | None = None) -> tuple[Line, Line]:
    """A worker's and the scheduler's end, after both hellos."""
    worker = Line(key, is_scheduler=False, limit=MAX_REQUEST_BYTES)
    scheduler = Line(key if other is None else other, is_scheduler=True, limit=MAX_REQUEST_BYTES)
    assert not list(worker.feed(scheduler.hello())) and not list(scheduler.feed(worker.hello()))
    return worker, scheduler


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "sealed"])
def test_messages_arrive_in_pieces_of_any_size(key: bytes | None) -> None:
    worker, scheduler = pair(key)
    data = b"".join(worker.pack({"op": "beat", "number": number}) for number in range(3))
    found = [message for byte in data for message in scheduler.feed(bytes([byte]))]
    assert [message["number"] for message in found] == [0, 1, 2]
    assert [message["op"] for message in worker.feed(scheduler.pack({"op": "welcome"}))] == ["welcome"]


def test_a_sealed_message_counts_once_in_its_place_and_direction() -> None:
    worker, scheduler = pair(KEY)
    first, second = worker.pack({"op": "beat"}), worker.pack({"op": "bye"})
    with pytest.raises(WireError, match="not of this job"):
        list(scheduler.feed(second))  # the first one was left out
    worker, scheduler = pair(KEY)
    with pytest.raises(WireError, match="not of this job"):
        list(scheduler.feed(first))  # of another connection
    worker, scheduler = pair(KEY)
    data = worker.pack({"op": "beat"})
    assert list(scheduler.feed(data))
    with pytest.raises(WireError, match="not of this job"):
        list(scheduler.feed(data))
    with pytest.raises(WireError, match="not of this job"):
        list(worker.feed(worker.pack({"op": "fail"})))  # sent back


def test_a_worker_with_another_key_or_none_is_not_heard() -> None:
    for key, other in ((b"another key of the right length", KEY), (None, KEY), (KEY, b"x" * 20)):
        worker, scheduler = pair(key, other)
        with pytest.raises(WireError, match="not of this job"):
            list(scheduler.feed(worker.pack(GOOD)))


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    for first in (b"", Line(None, is_scheduler=False, limit=100).hello()):
        line = Line(None, is_scheduler=True, limit=MAX_REQUEST_BYTES)
        try:
            for message in line.feed(first + data):
                assert isinstance(message["op"], str)
        except WireError:
            pass


@pytest.mark.parametrize(
    "change",
    [
        *({"node_id": value} for value in ("../x", "a" * 129, "a b", 3, None, "\x1b")),
        *({"incarnation": value} for value in ("", "short", "a" * 33, "../" + "a" * 29)),
        *({"pid": value} for value in (-1, 1 << 40, "1", True, 1.0)),
        *({"size": value} for value in (0, 10**9, None)),
        *({"generation": value} for value in (-2, "0")),
        *({"host": "h" * 256}, {"space": ["x"]}, {"job": 1}, {"joined": -1}),
    ],
    ids=repr,
)
def test_a_registration_of_other_types_or_sizes_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        registration({**GOOD, **change})


@pytest.mark.parametrize("change", [{"how": "well"}, {"code": 256}, {"code": None}, {"why": None}, {"how": ["done"]}])
def test_a_farewell_of_other_types_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        farewell({"how": "done", "code": 0, "why": "", **change})
