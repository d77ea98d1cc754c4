"""The messages between workers and scheduler: what comes over a socket may be anything."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.cluster.messages import Beat, Farewell, Identity, Over, Refused, Register, as_json, parse
from mindx_elastic.cluster.wire import Line, WireError
from mindx_elastic.core.pace import Pace, SlowRank

KEY = b"a key that only the job has"


class _Anywhere:
    """A socket that takes all."""

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def send(self, data: bytes) -> int:
        return len(data)


def line(key: bytes | None, *, is_scheduler: bool) -> Line:
    return Line(cast(socket.socket, _Anywhere()), key, is_scheduler=is_scheduler)


def pair(key: bytes | None = None, other: bytes | None = None) -> tuple[Line, Line]:
    """A worker's and the scheduler's end, after both greetings."""
    worker = line(key, is_scheduler=False)
    scheduler = line(key if other is None else other, is_scheduler=True)
    assert not list(worker.feed(scheduler.greeting())) and not list(scheduler.feed(worker.greeting()))
    return worker, scheduler


def test_a_sealed_message_counts_once_in_its_place_and_direction() -> None:
    worker, scheduler = pair(KEY)
    first, second = worker.pack(Beat()), worker.pack(Refused(""))
    with pytest.raises(WireError, match="not of this job"):
        list(scheduler.feed(second))  # the first one was left out
    worker, scheduler = pair(KEY)
    with pytest.raises(WireError, match="not of this job"):
        list(scheduler.feed(first))  # of another connection
    worker, scheduler = pair(KEY)
    data = worker.pack(Beat())
    assert list(scheduler.feed(data))
    with pytest.raises(WireError, match="not of this job"):
        list(scheduler.feed(data))
    with pytest.raises(WireError, match="not of this job"):
        list(worker.feed(worker.pack(Over(1, ""))))  # sent back


def test_what_a_large_node_says_of_its_ranks_fits_into_a_message() -> None:
    worker, scheduler = pair(KEY)
    beat = Beat(tuple(Pace(99_900 + number, *[1 << 40] * 4) for number in range(64)))
    assert list(scheduler.feed(worker.pack(beat))) == [beat]
    answer = Beat(slow=tuple(SlowRank(99_800 + number, 1 << 40, 1 << 40) for number in range(100)))
    assert list(worker.feed(scheduler.pack(answer))) == [answer]


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    for first in (b"", line(None, is_scheduler=False).greeting()):
        with suppress(WireError):
            list(line(None, is_scheduler=True).feed(first + data))


IDENTITY = Identity(host="h", pid=1, space="b/pid:[1]")
GOOD = Register(process=IDENTITY, incarnation="a" * 32, node_id="0", size=2, recovery=True, store=("h", 1))


@pytest.mark.parametrize(
    "change",
    [
        *({"node_id": value} for value in ("../x", "a" * 129, "a b", "\x1b")),
        *({"incarnation": value} for value in ("short", "../" + "a" * 29)),
        *({"size": value} for value in (-1, 10**9)),
        *({"process": {**as_json(GOOD)["process"], **value}} for value in ({"pid": 1 << 40}, {"space": ["x"]})),
        *({"store": ("h", port)} for port in (0, 1 << 16)),
        *({"process": 3}, {"job": 1}, {"op": "nothing"}, {"op": []}),
    ],
    ids=repr,
)
def test_a_message_of_other_types_or_sizes_is_refused(change: dict[str, Any]) -> None:
    """Node ids are names of files, and sizes are counted up to."""
    assert parse(as_json(GOOD)) == GOOD
    with pytest.raises(ValueError, match=r"."):
        parse({**as_json(GOOD), **change})


@given(st.from_type(Farewell), st.sampled_from([None, KEY]))
def test_a_message_comes_as_it_was_sent(farewell: Farewell, key: bytes | None) -> None:
    worker, scheduler = pair(key)
    message = Farewell(farewell.how, farewell.code % 256, "why" * (farewell.code % 100))
    for _ in range(2):
        assert list(scheduler.feed(worker.pack(message))) == [message]
    assert list(worker.feed(scheduler.pack(Over(1, "it is over")))) == [Over(1, "it is over")]
