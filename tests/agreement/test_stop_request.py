"""What a rank believes of a stop request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindx_elastic.agreement.stop_request import MAX_REQUEST, encode_request, parse_request

GOOD: dict[str, Any] = {
    "kind": "signal", "reason": "SIGTERM", "exit_code": 143, "origin": 1, "signum": 15, "grace_left_s": 29.5
}  # fmt: skip


def test_a_request_survives_the_exchange() -> None:
    assert parse_request(encode_request(GOOD), 2) == GOOD
    assert parse_request(encode_request({**GOOD, "signum": None}), 2)["signum"] is None


def test_the_longest_reason_fits() -> None:
    text = encode_request({**GOOD, "reason": "\N{GRINNING FACE}" * 100_000})
    assert len(text) <= MAX_REQUEST and parse_request(text, 2)["reason"]


def test_a_reason_is_shown_not_obeyed() -> None:
    found = parse_request(json.dumps({**GOOD, "reason": "\x1b[2J\r\nfine\u202e"}), 2)["reason"]
    assert found == r"\x1b[2J\r\nfine\u202e"


@pytest.mark.parametrize("field", GOOD)
@pytest.mark.parametrize("value", ["reboot", -1, 300, float("nan"), 1e9, True, [], {}])
def test_what_no_rank_would_send_is_refused(field: str, value: Any) -> None:
    if (field, value) in (("reason", "reboot"), ("grace_left_s", -1), ("grace_left_s", 300)):
        return
    with pytest.raises(ValueError, match="not "):
        parse_request(json.dumps({**GOOD, field: value}), 2)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "x" * (MAX_REQUEST + 1),
    ],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not |characters"):
        parse_request(text, 2)
