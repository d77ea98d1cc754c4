"""Policies: plain wishes, checked when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.alarm.alarm import ALARM_KINDS
from mindx_elastic.core.position import Position
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


@pytest.mark.parametrize("exceptions", [True, False])
def test_the_policy_of_a_plain_guard(tmp_path: Path, exceptions: bool) -> None:
    policy = breakpoint_policy("net", tmp_path, [15, 2], "flag.json", [{"epoch_num": 1}], exceptions=exceptions)
    assert policy.alarms == (ALARM_KINDS if exceptions else ALARM_KINDS - {"exception"})
    assert (policy.kind, policy.directory, policy.signals) == ("breakpoint", tmp_path, (15, 2))
    assert (policy.flag_file, policy.append_info) == (Path("flag.json"), ({"epoch_num": 1},))
    assert policy.name(Position(epoch=1, step_in_epoch=2)) == "net-1_2_breakpoint.safetensors"
    assert breakpoint_policy("net", tmp_path, [], None, [], exceptions=True).flag_file is None


# --- whose files ---


def test_a_job_is_known_by_its_own_prefix_and_those_of_its_callbacks(tmp_path: Path) -> None:
    policies = [breakpoint_policy("resnet", tmp_path, [15]), make(prefix="Net"), make()]
    assert job_names("ckpt", policies) == ("Net", "ckpt", "resnet")
