"""The arguments of a guard: checked at once, and laid over the environment."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic import Guard
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.options import GuardOptions
from mindx_elastic.guard.periodic import PeriodicSave, SaveEvery
from mindx_elastic.guard.policy import ExitPolicy
from tests.guarded import Job


def test_the_guards_arguments_are_these_and_the_state() -> None:
    """With the same defaults."""
    ours = {field.name: field.default for field in dataclasses.fields(GuardOptions)}
    state = {"model", "optimizer", "lr_scheduler", "scaler", "loader", "stateful"}
    theirs = {p.name: p.default for p in inspect.signature(Guard).parameters.values() if p.name not in state}
    del ours["directory"], theirs["directory"]
    assert theirs == ours


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"directory": ""}, "directory"),
        ({"directory": 3}, "directory"),
        ({"final_save": 1}, "final_save"),
        ({"signals": 15}, "signals"),
        ({"unmanaged": "ignore"}, 'give "error", "warn" or None'),
        ({"prefix": "a/b"}, "plain file name"),
        ({"append_info": [object()]}, "JSON"),
        *(
            ({"save_every": wrong}, "a number of steps, a time")
            for wrong in (-1, 0.5, True, "10", "10m", "0s", "often")
        ),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        GuardOptions(**{"directory": tmp_path, **wrong})


@pytest.mark.parametrize("alarms", [frozenset(), frozenset({"signal", "earthquake"})])
def test_the_alarms_of_a_policy_are_named(alarms: frozenset[str]) -> None:
    with pytest.raises(UsageError, match="alarm kinds"):
        ExitPolicy(kind="breakpoint", alarms=alarms, name=str, directory=Path())


def test_options_come_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_GRACE_S", "7")
    monkeypatch.setenv("MINDX_FINAL_SAVE", "0")
    monkeypatch.setenv("MINDX_TRUSTED_USERS", "1")
    plain = GuardOptions(directory=tmp_path)
    assert (plain.settings().grace_s, plain.settings().final_save) == (7, False)
    own = GuardOptions(directory=tmp_path, grace_s=9.0, final_save=True, trusted_users=[2], allow_shared_directory=True)
    assert (own.settings().grace_s, own.settings().final_save) == (9, True)
    assert (own.sharing().allow_shared, own.sharing().trusted_users) == (True, ("1", 2))


@pytest.mark.parametrize("make", [str, Path])
def test_without_policies_there_is_one_for_breakpoints(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    (policy,) = GuardOptions(directory=make(tmp_path), prefix="net", save_on_exception=False).exit_policies()
    assert (policy.kind, policy.directory, policy.prefix) == ("breakpoint", tmp_path, "net")
    assert "exception" not in policy.alarms
    assert GuardOptions(directory=tmp_path, policies=[]).exit_policies() == ()


@pytest.mark.parametrize(
    ("value", "when"),
    [
        (500, {"steps": 500}),
        ("90s", {"seconds": 90.0}),
        ("10min", {"seconds": 600.0}),
        ("1.5 h", {"seconds": 5400.0}),
        ("auto", {"adapts": True}),
    ],
)
def test_save_every_is_one_more_periodic_policy(tmp_path: Path, value: int | str, when: dict[str, Any]) -> None:
    (policy,) = GuardOptions(directory=tmp_path, prefix="net", save_every=value).periodic_policies()
    assert isinstance(policy, PeriodicSave) and policy.every == SaveEvery(**when)
    assert (policy.directory, policy.prefix, policy.keep_max, policy.asynchronous) == (tmp_path, "net", 2, True)
    assert GuardOptions(directory=tmp_path, periodic=[policy], save_every=0).periodic_policies() == (policy,)


@pytest.mark.parametrize(
    ("options", "told"),
    [({}, "Guard(save_every="), ({"save_every": 3}, ""), ({"snapshot_every": 5}, ""), ({"policies": []}, "ModelCheck")],
)
def test_a_training_that_sigkill_would_cost_everything_says_so_once(
    tmp_path: Path, options: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path / "ckpt", **options)
    with caplog.at_level("INFO", logger="mindx_elastic"):
        job.run(1)
    lines = [line for line in caplog.messages if "SIGKILL" in line]
    assert [line.count(told) for line in lines] == ([1] if told else []), caplog.text
