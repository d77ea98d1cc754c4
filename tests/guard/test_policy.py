"""Policies: plain wishes, checked when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.alarm.alarm import ALARM_KINDS
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.policy import (
    ExitPolicy,
    breakpoint_policy,
    job_names,
)


def make(**fields: Any) -> ExitPolicy:
    given: dict[str, Any] = {"kind": "breakpoint", "alarms": ALARM_KINDS, "name": str, "directory": Path()}
    return ExitPolicy(**{**given, **fields})


@pytest.mark.parametrize("alarms", [frozenset(), frozenset({"signal", "earthquake"})])
def test_alarms_must_be_known(alarms: frozenset[str]) -> None:
    with pytest.raises(UsageError, match="alarm kinds"):
        make(alarms=alarms)


# --- whose files ---


def test_a_job_is_known_by_its_own_prefix_and_those_of_its_callbacks(tmp_path: Path) -> None:
    policies = [breakpoint_policy("resnet", tmp_path, ALARM_KINDS, [15]), make(prefix="Net"), make()]
    assert job_names("ckpt", policies) == ("Net", "ckpt", "resnet")
