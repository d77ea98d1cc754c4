"""What every command does alike: bars, errors, tracebacks, completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import run_in_terminal

SLOW_VERIFY = """
import sys, time
import mindx_elastic.cli.progress as progress
import mindx_elastic.persist.reader as reader
whole = reader.verify_file
def slow(*args, **more):
    found = whole(*args, **more)
    time.sleep({seconds})
    return found
reader.verify_file = slow
progress.DELAY_S = {delay}
from mindx_elastic.cli.main import main
sys.argv = ["mindx-elastic", "verify", {path!r}, "--json"]
main()
"""


def verify(tree: Path, *, seconds: float, delay: float) -> list[str]:
    return [sys.executable, "-c", SLOW_VERIFY.format(seconds=seconds, delay=delay, path=str(tree))]


# --- progress bars ---


def test_long_work_shows_a_bar_on_the_terminal_and_nothing_of_it_in_the_pipe(tree: Path) -> None:
    code, printed, shown = run_in_terminal(verify(tree, seconds=0.5, delay=0.05), env={**os.environ, "TERM": "xterm"})
    assert code == 0
    assert json.loads(printed)["bad"] == 0
    assert "verifying" in shown
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "the bar is wiped out at the end"


def test_short_work_shows_nothing(tree: Path) -> None:
    code, _, shown = run_in_terminal(verify(tree, seconds=0, delay=600), env={**os.environ, "TERM": "xterm"})
    assert (code, shown) == (0, "")


def test_no_bar_in_a_pipe_even_where_ci_forces_colours(tree: Path) -> None:
    env = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "CI": "1", "TERM": "xterm"}
    done = subprocess.run(
        verify(tree, seconds=0.5, delay=0.05), env=env, capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_dumb_terminal_gets_no_bar(tree: Path) -> None:
    code, _, shown = run_in_terminal(verify(tree, seconds=0.5, delay=0.05), env={**os.environ, "TERM": "dumb"})
    assert (code, shown) == (0, "")


# --- errors ---


def break_plan(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def find(*_: object) -> None:
        raise error

    monkeypatch.delenv("MINDX_DEBUG", raising=False)
    monkeypatch.setattr("mindx_elastic.cli.plan_inputs.find", find)


def test_an_unexpected_error_is_one_line_with_the_way_to_the_traceback(
    run: Callable[..., Any], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_plan(monkeypatch, ZeroDivisionError("by\nnothing"))
    done = run("plan", tree)
    assert done.exit_code == 70, "1 would say that nothing can be restored"
    assert done.stderr == (
        "mindx-elastic: error: unexpected ZeroDivisionError: by\\nnothing "
        f"(the traceback: mindx-elastic --debug plan {tree})\n"
    )


@pytest.mark.parametrize("words", [["--debug"], []])
def test_debug_shows_the_traceback_and_the_same_line_and_code(
    run: Callable[..., Any], tree: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    break_plan(monkeypatch, ZeroDivisionError("by nothing"))
    monkeypatch.setenv("MINDX_DEBUG", "0" if words else "1")
    done = run(*words, "plan", tree)
    assert done.exit_code == 70
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("\nmindx-elastic: error: unexpected ZeroDivisionError: by nothing\n")


def test_an_error_of_the_system_names_the_file_and_is_2(
    run: Callable[..., Any], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_plan(monkeypatch, PermissionError(13, "Permission denied", "/x/y"))
    done = run("plan", tree)
    assert done.exit_code == 2
    assert done.stderr.startswith("mindx-elastic: error: /x/y: Permission denied (the traceback: ")


def test_a_job_keeps_its_traceback(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be had by giving the command again."""

    def launch(_: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("mindx_elastic.agent.launcher.launch", launch)
    with pytest.raises(ZeroDivisionError):
        run("run", "train.py")


def test_a_reader_that_has_gone_is_no_error(tree: Path) -> None:
    command = f"{sys.executable} -m mindx_elastic.cli.main inspect {tree} --json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=250, check=False)
    assert done.stderr == ""


# --- completion ---


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for shell in ("bash", "zsh", "fish"):
        path = tmp_path_factory.mktemp("completion") / f"mindx.{shell}"
        with open(path, "w") as file:
            words = [sys.executable, "-m", "mindx_elastic.cli.main", "completion", shell]
            subprocess.run(words, stdout=file, check=True, timeout=250)
        found[shell] = path
    return found


LINES = [
    ("pr", {"prove"}),
    ("--deb", {"--debug"}),
    ("verify --j", {"--json"}),
    ("run --nproc", {"--nproc-per-node"}),
    ("run --recover ", {"restart", "in-place"}),
    ("run --snapshot-every ", {"auto", "0"}),
    ("manifest ", {"kubernetes", "jobset", "trainer", "volcano", "slurm"}),
    ("convert a b --to d", {"dcp"}),
    ("completion ", {"bash", "zsh", "fish"}),
    ("run train.py --nproc", set()),
    ("prove -- train.py --js", set()),
]


def test_bash_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    """By the function that bash calls, with the variables that it sets."""
    body = [f"source {scripts['bash']}"]
    for line, _ in LINES:
        words = line.split(" ")
        body.append(f"COMP_WORDS=(mindx-elastic {' '.join(word or repr('') for word in words)})")
        body.append(f"COMP_CWORD={len(words)}; _mindx_elastic 2>/dev/null; echo ${{COMPREPLY[*]}}")
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(body)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    assert [set(line.split()) for line in done.stdout.splitlines()] == [found for _, found in LINES]


def test_a_tab_in_a_real_bash(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    typed = (
        f'source {scripts["bash"]}\nmindx-elastic() {{ echo "got:$*" >> out; }}\n'
        "mindx-elastic insp\t chec\t --verif\t\nmindx-elastic run --recover in\t --run-dir chec\t\n"
        "mindx-elastic run --recover=in\t --notice=az\t\nexit\n"
    )
    env = {**os.environ, "HOME": str(tmp_path), "TERM": "xterm", "INPUTRC": "/dev/null"}
    run_in_terminal(["bash", "--norc", "-c", f"cd {tmp_path} && exec bash --norc -i"], env=env, typed=typed)
    assert (tmp_path / "out").read_text().splitlines() == [
        "got:inspect checkpoints/ --verify",
        "got:run --recover in-place --run-dir checkpoints/",
        "got:run --recover=in-place --notice=azure",
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    for line, expected in LINES:
        command = f"source {scripts['fish']}; complete -C 'mindx-elastic {line}'"
        env = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(
            ["fish", "--no-config", "-c", command], capture_output=True, text=True, timeout=250, check=True, env=env
        )
        found = {row.split("\t")[0] for row in done.stdout.splitlines()}
        assert found == expected or (line.endswith(" ") and expected <= found), line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_accepts_the_script(scripts: dict[str, Path], tmp_path: Path) -> None:
    command = (
        f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source {scripts['zsh']}; echo $_comps[mindx-elastic]"
    )
    done = subprocess.run(["zsh", "-f", "-c", command], capture_output=True, text=True, timeout=250, check=False)
    assert (done.stdout, done.stderr) == ("_mindx_elastic\n", "")
