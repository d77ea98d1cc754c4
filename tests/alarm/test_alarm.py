"""Which alarm becomes of a signal, a request, an order; and the exit codes of all stops."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.alarm.alarm import Alarms, StopRequest, signal_name
from mindx_elastic.alarm.exit_codes import exit_code_of_signal
from mindx_elastic.config import RankInfo, Settings


def make_alarms(*, grace_s: float = 30.0, **exit_codes: int) -> Alarms:
    return Alarms(Settings(grace_s=grace_s), RankInfo(), exit_codes)


@pytest.mark.parametrize(
    ("content", "code"), [({"kind": "signal", "exit_code": 143}, 143), ({"kind": "exception", "exit_code": 1}, 75)]
)
def test_a_peers_alarm_keeps_its_deadline_and_says_where_it_came_from(content: dict[str, Any], code: int) -> None:
    request = StopRequest(reason="SIGTERM", origin=3, signum=15, grace_left_s=4.0, **content)
    alarm = make_alarms().of_peer(request)
    assert (alarm.reason, alarm.origin, alarm.exit_code) == ("SIGTERM on rank 3", 3, code)
    assert 3 < alarm.deadline.remaining_s() <= 4


def test_a_request_is_read_as_it_was_sent() -> None:
    sent = make_alarms().of_signal(signal.SIGINT)
    heard = make_alarms().of_peer(sent.to_request(), is_sealed=True)
    assert (heard.kind, heard.signum, heard.exit_code, heard.origin) == ("signal", signal.SIGINT, 130, 0)
    assert heard.deadline.at == pytest.approx(sent.deadline.at, abs=1.0)


@pytest.mark.parametrize(
    ("kind", "code"), [("signal", 143), ("flag", 75), ("exception", 1), ("death", 75), ("orphan", 75), ("fault", 75)]
)
def test_each_kind_has_its_exit_code(kind: str, code: int) -> None:
    alarms = make_alarms()
    made = {
        "signal": alarms.of_signal(signal.SIGTERM),
        "flag": alarms.of_flag(Path("flag.json")),
        "exception": alarms.of_exception(ValueError("x")),
        "death": alarms.of_death([1]),
        "orphan": alarms.of_orphan(),
        "fault": alarms.of_fault("x"),
    }
    assert made[kind].exit_code == code


REQUEST = StopRequest(kind="request", reason="enough", exit_code=0, origin=1, grace_left_s=30.0)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 75),  # never as if the training had finished
        ({"exit_code": 9}, 9),
        ({"kind": "signal", "signum": 15, "exit_code": 0}, 143),
        ({"kind": "signal", "exit_code": 0}, 75),
        ({"kind": "flag", "exit_code": 143}, 0),  # this rank's own policy says so
        ({"kind": "fault", "exit_code": 0}, 75),
        ({"kind": "peer", "exit_code": 0}, 75),
        ({"kind": "exception", "exit_code": 0}, 75),
    ],
)
def test_how_to_leave_is_not_for_a_stranger_to_say(change: dict[str, Any], code: int) -> None:
    alarms = make_alarms(flag=0)
    assert alarms.of_peer(replace(REQUEST, **change)).exit_code == code


def test_another_rank_that_is_known_may_say_how_to_leave() -> None:
    assert make_alarms().of_peer(REQUEST, is_sealed=True).exit_code == 0
    assert make_alarms().of_peer(replace(REQUEST, kind="exception"), is_sealed=True).exit_code == 75


@pytest.mark.parametrize("left_s", [-5.0, 0.0, 0.1])
def test_a_stranger_cannot_take_the_time_to_save(left_s: float) -> None:
    assert make_alarms().of_peer(replace(REQUEST, grace_left_s=left_s)).deadline.remaining_s() > 2
    assert make_alarms().of_peer(replace(REQUEST, grace_left_s=left_s), is_sealed=True).deadline.grace_s == 0.5


def test_a_reason_is_shown_not_obeyed() -> None:
    alarms = make_alarms()
    foreign = "\x1b[31mred\r\nline"
    for alarm in (
        alarms.of_request(foreign, 0),
        alarms.of_fault(foreign),
        alarms.of_exception(ValueError(foreign)),
        alarms.of_agent({"kind": "peer", "reason": foreign}),
    ):
        assert alarm.reason.isprintable() and "red" in alarm.reason


@pytest.mark.parametrize(
    "content",
    [
        {"exit_code": -1},
        {"grace_s": float("nan")},
    ],
)
def test_an_order_without_sense_still_stops(content: dict[str, Any]) -> None:
    alarm = make_alarms().of_agent({"kind": "fault", "reason": "x", **content})
    assert (alarm.exit_code, alarm.deadline.grace_s) == (75, 30.0)


@pytest.mark.parametrize(("signum", "name"), [(15, "SIGTERM"), (2, "SIGINT"), (10, "SIGUSR1"), (40, "signal 40")])
def test_signals_have_names_and_exit_codes(signum: int, name: str) -> None:
    assert signal_name(signum) == name
    assert exit_code_of_signal(signum) == 128 + signum
