"""Environments that are wrong, and those that must be left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.doctor.saving import Level
from mindx_elastic.doctor.variables import judge_variables, known_names

WRONG = [
    ({"MINDX_GRACE": "30"}, Level.WARNING, "MINDX_GRACE is read by nothing", "MINDX_GRACE_S?"),
    ({"MINDX_NONSENSE_XYZ": "1"}, Level.WARNING, "read by nothing", "reference.md"),
    ({"MS_ENABLE_GRACEFULL_EXIT": "1"}, Level.WARNING, "read by nothing", "MS_ENABLE_GRACEFUL_EXIT?"),
    ({"MINDX_GRACE_S": "60", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}, Level.PROBLEM, "kills after 30 s", "--grace 60"),
]
RIGHT = [
    {"MINDX_GRACE_S": "30", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
    {"MS_COMPILER_CACHE_ENABLE": "1", "TORCH_HOME": "/x", "MS_DEV_SAVE_GRAPHS": "1"},
]


@pytest.mark.parametrize(("env", "level", "text", "remedy"), WRONG, ids=lambda each: str(each)[:40])
def test_what_is_wrong_has_a_remedy(env: dict[str, str], level: Level, text: str, remedy: str) -> None:
    found = judge_variables(env)
    assert [each.level for each in found] == [level], found
    assert any(text in each.text and remedy in each.remedy and each.remedy for each in found), found


@pytest.mark.parametrize("env", RIGHT, ids=str)
def test_good_environments_are_left_alone(env: dict[str, str]) -> None:
    assert judge_variables(env) == []


def test_all_documented_variables_are_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    named = {word.strip("`,") for word in page.split() if word.startswith("`MINDX_") and word.strip("`,").isupper()}
    assert len(named) > 20
    assert {name for name in named if name.replace("_", "").isalnum()} <= known_names()


def test_escape_sequences_are_shown_and_not_obeyed() -> None:
    found = judge_variables({"MINDX_\x1b[31m": "1"})
    assert found and not any("\x1b" in each.text + each.remedy for each in found)
