"""Which alarm becomes of a signal, a request, an order; what a rank believes of another one's; and the exit codes."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.alarm.alarm import MAX_REQUEST, Alarms, StopRequest, signal_name
from mindx_elastic.config import RankInfo, Settings

FOREIGN = "\x1b[2J\r\nfine\u202e"
SHOWN = r"\x1b[2J\r\nfine\u202e"


def make_alarms(**exit_codes: int) -> Alarms:
    return Alarms(Settings(grace_s=30.0), RankInfo(), exit_codes)


@pytest.mark.parametrize("name", ["signal", "orphan"])
def test_another_rank_has_the_alarm_as_it_was_made(name: str) -> None:
    alarms = make_alarms()
    made = alarms.of_signal(signal.SIGINT) if name == "signal" else alarms.of_orphan()
    heard = make_alarms().of_peer(StopRequest.decode(made.to_request().encode(), 2), is_sealed=True)
    assert heard.deadline.at == pytest.approx(made.deadline.at, abs=1.0)
    assert heard._replace(deadline=made.deadline) == made._replace(reason=f"{made.reason} on rank 0")


def test_each_kind_has_its_exit_code() -> None:
    alarms = make_alarms()
    made = [alarms.of_signal(signal.SIGTERM), alarms.of_flag(Path("flag.json")), alarms.of_exception(ValueError("x"))]
    made += [alarms.of_death([1]), alarms.of_orphan(), alarms.of_fault("x"), alarms.of_request("x", 9)]
    assert [alarm.exit_code for alarm in made] == [143, 75, 1, 75, 75, 75, 9]


REQUEST = StopRequest(kind="request", reason="enough", exit_code=0, origin=1, grace_left_s=30.0)


@pytest.mark.parametrize(
    ("change", "code", "sealed"),
    [
        ({}, 75, 0),  # never as if the training had finished
        ({"exit_code": 9}, 9, 9),
        ({"kind": "signal", "signum": 15, "exit_code": 0}, 143, 0),
        ({"kind": "signal", "exit_code": 0}, 75, 0),
        ({"kind": "flag", "exit_code": 143}, 0, 143),  # this rank's own policy says so
        ({"kind": "fault", "exit_code": 0}, 75, 0),
        ({"kind": "peer", "exit_code": 0}, 75, 0),
        ({"kind": "exception", "exit_code": 0}, 75, 75),
    ],
)
def test_how_to_leave_is_not_for_a_stranger_to_say(change: dict[str, Any], code: int, sealed: int) -> None:
    alarms, request = make_alarms(flag=0), replace(REQUEST, **change)
    assert [alarms.of_peer(request, is_sealed=each).exit_code for each in (False, True)] == [code, sealed]


def test_a_stranger_cannot_take_the_time_to_save() -> None:
    for left_s in (-5.0, 0.1):
        hurried = replace(REQUEST, grace_left_s=left_s)
        assert make_alarms().of_peer(hurried).deadline.remaining_s() > 2
        assert make_alarms().of_peer(hurried, is_sealed=True).deadline.grace_s == 0.5


def test_an_order_without_sense_still_stops() -> None:
    for content in ({"exit_code": -1}, {"grace_s": float("nan")}):
        alarm = make_alarms().of_agent({"kind": "fault", "reason": "x", **content})
        assert (alarm.exit_code, alarm.deadline.grace_s) == (75, 30.0)


def test_a_reason_is_shown_not_obeyed() -> None:
    alarms = make_alarms()
    made = [alarms.of_request(FOREIGN, 0), alarms.of_fault(FOREIGN), alarms.of_agent({"kind": "x", "reason": FOREIGN})]
    assert {alarm.reason for alarm in made} == {SHOWN}
    assert alarms.of_exception(ValueError(FOREIGN)).reason == f"exception: ValueError: {SHOWN}"
    assert StopRequest.decode(json.dumps({**GOOD, "reason": FOREIGN}), 2).reason == SHOWN
    longest = replace(REQUEST, reason="\N{GRINNING FACE}" * 100_000).encode()
    assert len(longest) <= MAX_REQUEST and StopRequest.decode(longest, 2).reason


GOOD: dict[str, Any] = {
    "kind": "signal", "reason": "SIGTERM", "exit_code": 143, "origin": 1, "signum": 15, "grace_left_s": 29.5
}  # fmt: skip


@pytest.mark.parametrize("field", GOOD)
def test_what_no_rank_would_send_is_refused(field: str) -> None:
    fine: dict[str, list[Any]] = {"reason": ["reboot"], "grace_left_s": [-1, 300]}
    values: list[Any] = ["reboot", -1, 300, float("nan"), 1e9, True, [], {}]
    for value in values:
        if value not in fine.get(field, []):
            with pytest.raises(ValueError, match=r"none of|not |no rank"):
                StopRequest.decode(json.dumps({**GOOD, field: value}), 2)


@pytest.mark.parametrize("text", ["[]", "x" * (MAX_REQUEST + 1)])
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not |characters"):
        StopRequest.decode(text, 2)


def test_signals_have_names() -> None:
    assert [signal_name(number) for number in (15, 2, 10, 40)] == ["SIGTERM", "SIGINT", "SIGUSR1", "signal 40"]
