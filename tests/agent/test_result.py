"""``result.json``: what a script may do after the agent's end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.history import AttemptRecord
from mindx_elastic.agent.launcher import launch
from mindx_elastic.agent.result import (
    FRUITLESS_MOST,
    RESULT_FILE,
    JobResult,
    ResultFile,
    RunProgress,
    find_progress,
    read_result,
)
from mindx_elastic.errors import UsageError


def end(run_dir: Path, *args: Any, **more: Any) -> JobResult:
    with ResultFile() as file:
        file.open(run_dir)
        file.write(*args, **more)
    found = read_result(run_dir)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("outcome", "code", "retry"),
    [
        ("finished", 0, False),
        ("stopped", 143, True),
        ("stopped", 0, False),
        ("failed", 1, False),
        ("failed", 75, True),
        ("failed", 137, True),
        ("failed", 139, False),
    ],
)
def test_what_is_worth_another_start(tmp_path: Path, outcome: str, code: int, retry: bool) -> None:
    result = end(tmp_path, outcome, code, "why", RunProgress(saved_step=7, progressed=True, attempts=2))
    assert (result.retry, result.exit_code, result.saved_step, result.attempts) == (retry, code, 7, 2)
    assert ('"retry": true' in (tmp_path / RESULT_FILE).read_text()) is retry, "for grep"
    assert not end(tmp_path, outcome, code, "why", RunProgress(7, True), final=True).retry, "a crash loop"


def test_stops_before_the_first_step_come_to_an_end(tmp_path: Path) -> None:
    none = RunProgress(saved_step=None, progressed=False)
    assert [end(tmp_path, "stopped", 143, "SIGTERM", none).retry for _ in range(FRUITLESS_MOST + 1)] == [
        *[True] * (FRUITLESS_MOST - 1),
        *[False] * 2,
    ]
    assert end(tmp_path, "stopped", 143, "SIGTERM", RunProgress(3, True)).fruitless == 0
    assert end(tmp_path, "stopped", 143, "SIGTERM", none).retry


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [(UsageError("--x: no"), "usage", 2), (SystemExit(2), "usage", 2), (KeyError("x"), "failed", 1)],
)
def test_an_error_is_an_end_too(tmp_path: Path, error: BaseException, outcome: str, code: int) -> None:
    def fail() -> None:
        with ResultFile() as file:
            file.open(tmp_path)
            raise error

    with pytest.raises(type(error)):
        fail()
    found = read_result(tmp_path)
    assert found is not None and (found.outcome, found.exit_code, found.retry) == (outcome, code, False)


def test_a_wrong_option_is_noted_where_the_run_directory_is_known(tmp_path: Path) -> None:
    for wrong in (["--notice", "gcp"], ["--nproc-per-node", "0"]):
        (tmp_path / RESULT_FILE).unlink(missing_ok=True)
        with pytest.raises(UsageError):
            launch(["--run-dir", str(tmp_path), *wrong, __file__])
        found = read_result(tmp_path)
        assert found is not None and (found.outcome, found.exit_code, found.retry) == ("usage", 2, False), wrong


def test_before_there_is_a_run_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ResultFile() as file:
        file.write("failed", 1)
    assert not list(tmp_path.iterdir())


GOOD = {"version": 1, "outcome": "stopped", "exit_code": 143, "retry": True}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "[" * 100_000, '{"retry": true}', "\x00\xff"),
        *(json.dumps({**GOOD, **wrong}) for wrong in ({"version": 2}, {"retry": "true"}, {"outcome": "splendid"})),
        *(json.dumps({**GOOD, **wrong}) for wrong in ({"fruitless": -3}, {"progressed": 1}, {"reason": "x" * 200_000})),
    ],
)
def test_half_written_and_foreign_files_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / RESULT_FILE).write_text(content)
    assert read_result(tmp_path) is None
    assert end(tmp_path, "stopped", 143).fruitless == 1, "and are replaced"


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path) -> None:
    (tmp_path / RESULT_FILE).write_text(json.dumps({**GOOD, "reason": "a\x1b[2Jb"}))
    assert read_result(tmp_path) == JobResult(outcome="stopped", exit_code=143, retry=True, reason="a\\x1b[2Jb")


def record(attempt: int, **more: Any) -> AttemptRecord:
    return AttemptRecord(attempt=attempt, **more)


@pytest.mark.parametrize(
    ("records", "progress"),
    [
        ([], RunProgress()),
        ([record(0, step_reached=-1)], RunProgress(None, None, 1)),
        ([record(0, resumed_step=-1, step_reached=0, saved_step=0)], RunProgress(0, False, 1)),
        ([record(0, resumed_step=-1, step_reached=4, saved_step=4)], RunProgress(4, True, 1)),
        ([record(0, resumed_step=7, step_reached=7, saved_step=7)], RunProgress(7, False, 1)),
        ([record(0, resumed_step=7, step_reached=9)], RunProgress(7, False, 1)),
        ([record(0, resumed_step=-1, saved_step=9), record(1, resumed_step=5)], RunProgress(5, True, 2)),
        ([record(0, resumed_step=-1), record(1, resumed_step=6), record(2)], RunProgress(6, True, 3)),
        ([record(0, resumed_step=-1, step_reached=9, outcome="finished")], RunProgress(None, True, 1)),
    ],
)
def test_what_attempts_have_come_to(records: list[AttemptRecord], progress: RunProgress) -> None:
    assert find_progress(records) == progress
