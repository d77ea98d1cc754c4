"""The stop request that a rank sends to the others when it has heard an alarm, and its check. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mindx_elastic.alarm.alarm import REQUEST_KINDS
from mindx_elastic.core.printable import printable

__all__ = ["MAX_REASON", "MAX_REQUEST", "encode_request", "parse_request"]

MAX_REASON = 400
"""Longest reason, in characters."""
MAX_REQUEST = 16384
"""Longest request, in characters."""
_MAX_SIGNAL = 64
_MAX_GRACE_S = 86400.0


def encode_request(content: Mapping[str, Any]) -> str:
    """`content` as `parse_request` gives it back."""
    return json.dumps({**content, "reason": printable(content["reason"], MAX_REASON)})


def parse_request(text: str, world_size: int) -> dict[str, Any]:
    """Read a stop request from the store. Raises ValueError for anything that no rank sends.

    The fields: ``kind``, ``reason`` (one printable line), ``origin`` (the rank that heard the alarm), ``exit_code``
    (0..255), ``signum`` (1..64 or None), ``grace_left_s`` (finite; seconds).
    """
    if len(text) > MAX_REQUEST:
        raise ValueError(f"a stop request of {len(text)} characters")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    kind, reason, grace_s = content.get("kind"), content.get("reason"), content.get("grace_left_s")
    signum = content.get("signum")
    if not isinstance(kind, str) or kind not in REQUEST_KINDS:
        raise ValueError(f"not a kind of alarm: {printable(kind, 60)!r}")
    if not isinstance(reason, str):
        raise ValueError("the reason is not text")
    if (
        isinstance(grace_s, bool)
        or not isinstance(grace_s, (int, float))
        or not -_MAX_GRACE_S <= grace_s <= _MAX_GRACE_S
    ):
        raise ValueError("grace_left_s is not a number of seconds")
    if signum is not None:
        _whole(signum, 1, _MAX_SIGNAL, "signal")
    return {
        "kind": kind,
        "reason": printable(reason),
        "exit_code": _whole(content.get("exit_code"), 0, 255, "exit code"),
        "origin": _whole(content.get("origin"), 0, world_size - 1, "rank"),
        "signum": signum,
        "grace_left_s": float(grace_s),
    }


def _whole(value: object, low: int, high: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"the {what} is not a whole number from {low} to {high}")
    return value
