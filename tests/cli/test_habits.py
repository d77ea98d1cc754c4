"""What every command does alike: bars, errors, tracebacks, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

# --- errors ---


def break_plan(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def find(*_: object) -> None:
        raise error

    monkeypatch.delenv("MINDX_DEBUG", raising=False)
    monkeypatch.setattr("mindx_elastic.cli.checkpoints.look_at", find)


def test_an_unexpected_error_is_one_line_with_the_way_to_the_traceback(
    run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_plan(monkeypatch, ZeroDivisionError("by\nnothing"))
    done = run("plan", tree)
    assert done.exit_code == 70, "1 would say that nothing can be restored"
    assert done.stderr == (
        "mindx-elastic: error: unexpected ZeroDivisionError: by\\nnothing "
        f"(the traceback: mindx-elastic --debug plan {tree})\n"
    )


def test_debug_shows_the_traceback_and_the_same_line_and_code(
    run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_plan(monkeypatch, ZeroDivisionError("by nothing"))
    monkeypatch.setenv("MINDX_DEBUG", "0")
    done = run("--debug", "plan", tree)
    assert done.exit_code == 70
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("\nmindx-elastic: error: unexpected ZeroDivisionError: by nothing\n")


def test_an_error_of_the_system_names_the_file_and_is_2(run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_plan(monkeypatch, PermissionError(13, "Permission denied", "/x/y"))
    done = run("plan", tree)
    assert done.exit_code == 2
    assert done.stderr.startswith("mindx-elastic: error: /x/y: Permission denied (the traceback: ")


def test_a_job_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be had by giving the command again."""

    def launch(_: list[str], **more: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("mindx_elastic.agent.launcher.launch", launch)
    with pytest.raises(ZeroDivisionError):
        run("run", "train.py")


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = f"{sys.executable} -m mindx_elastic.cli.main --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=250, check=False)
    assert done.stderr == ""


# --- completion: typer's own ---


def complete(*words: str, cwd: Path) -> set[str]:
    """What bash is given for the last of these words."""
    env = {**os.environ, "_MINDX_ELASTIC_COMPLETE": "complete_bash", "_TYPER_COMPLETE_ARGS": " ".join(words)}
    env |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    code = "from mindx_elastic.cli.app import app; app(prog_name='mindx-elastic')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_commands_and_options_are_completed(tmp_path: Path) -> None:
    assert complete("mindx-elastic", "verify", "--j", cwd=tmp_path) == {"--json"}
    assert complete("mindx-elastic", "ins", cwd=tmp_path) == {"inspect"}
