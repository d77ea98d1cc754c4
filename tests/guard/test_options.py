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
        ({"prefix": "a/b"}, "plain file name"),
        ({"append_info": [object()]}, "JSON"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        GuardOptions(**{"directory": tmp_path, **wrong})


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
