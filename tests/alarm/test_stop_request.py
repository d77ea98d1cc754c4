"""What a rank believes of a stop request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindx_elastic.alarm.alarm import MAX_REQUEST, StopRequest

GOOD: dict[str, Any] = {
    "kind": "signal", "reason": "SIGTERM", "exit_code": 143, "origin": 1, "signum": 15, "grace_left_s": 29.5
}  # fmt: skip


def test_a_request_survives_the_exchange() -> None:
    assert StopRequest.decode(StopRequest(**GOOD).encode(), 2) == StopRequest(**GOOD)
    assert StopRequest.decode(StopRequest(**{**GOOD, "signum": None}).encode(), 2).signum is None


def test_the_longest_reason_fits() -> None:
    text = StopRequest(**{**GOOD, "reason": "\N{GRINNING FACE}" * 100_000}).encode()
    assert len(text) <= MAX_REQUEST and StopRequest.decode(text, 2).reason


def test_a_reason_is_shown_not_obeyed() -> None:
    found = StopRequest.decode(json.dumps({**GOOD, "reason": "\x1b[2J\r\nfine\u202e"}), 2).reason
    assert found == r"\x1b[2J\r\nfine\u202e"


@pytest.mark.parametrize("field", GOOD)
@pytest.mark.parametrize("value", ["reboot", -1, 300, float("nan"), 1e9, True, [], {}])
def test_what_no_rank_would_send_is_refused(field: str, value: Any) -> None:
    if (field, value) in (("reason", "reboot"), ("grace_left_s", -1), ("grace_left_s", 300)):
        return
    with pytest.raises(ValueError, match=r"none of|not |no rank"):
        StopRequest.decode(json.dumps({**GOOD, field: value}), 2)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "x" * (MAX_REQUEST + 1),
    ],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not |characters"):
        StopRequest.decode(text, 2)
