from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from mindx_elastic.cli.common import human_age, parse_size
from mindx_elastic.cli.main import main
from mindx_elastic.cli.run import LAUNCHERS
from tests.checkpoint_files import write
from tests.cli.conftest import Run


@pytest.mark.parametrize("words", [["--", "train.py", "--", "x"], ["-mr3", "module", "--help"], []])
def test_run_hands_on_every_word_as_it_is(run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a "--", which a command line parser would take for itself: torchrun and the script want to see it."""
    given: list[list[str]] = []

    def launch(arguments: list[str], **_: object) -> int:
        given.append(arguments)
        return 7

    monkeypatch.setattr("mindx_elastic.agent.launcher.launch", launch)
    assert run("run", *words).exit_code == 7
    assert given == [words]


def test_whoever_starts_a_command_may_ignore_the_ends_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is inherited, and the system then tells no exit codes: a job that has crashed had finished."""
    codes: list[int] = []
    monkeypatch.setitem(LAUNCHERS, "run", lambda _: codes.append(subprocess.run(["false"], check=False).returncode))
    monkeypatch.setattr(sys, "argv", ["mindx-elastic", "run"])
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        main()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert codes == [1]


def test_help_of_run_says_what_it_does_and_shows_all_options(run: Run) -> None:
    result = run("run", "--nproc-per-node", "2", "-h", "train.py")
    about, _, ours = result.stdout.partition("options of mindx-elastic")
    assert result.exit_code == 0 and "\b" not in about and "[bold]" not in about
    assert "as torchrun does" in about and "--rdzv-backend" in about and "--metrics-port" in ours


@pytest.mark.parametrize("words", [["inspct"], ["inspect", "--jsn", "."]])
def test_wrong_usage_is_2(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_missing_path_is_named_with_the_part_that_exists(run: Run, tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "chekpt" / "rank_0")
    assert result.exit_code == 2 and result.stdout == ""
    assert f"{tmp_path / 'chekpt' / 'rank_0'} does not exist" in result.stderr
    assert run(command, tmp_path / "chekpt").stderr.endswith("does not exist\n")
    assert "/dev/null is neither a folder nor a file" in run(command, "/dev/null").stderr


def test_help_and_version_do_not_wait_for_torch() -> None:
    code = (
        "import sys, mindx_elastic.cli.app as m\n"
        "try: m.app(['--version'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
    )


@pytest.mark.drill
def test_what_the_locale_cannot_show_is_escaped(tmp_path: Path) -> None:
    write(tmp_path / "caf\u00e9-1_1.safetensors", reason="exception: \u6a21\u578b")
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for command, expected in (("inspect", b"exception: \\u6a21\\u578b"), ("verify", b"caf\\xe9-1_1.safetensors")):
        words = [sys.executable, "-m", "mindx_elastic.cli.main", command, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, timeout=60, check=False, env=env)
        assert done.returncode == 0 and expected in done.stdout and done.stderr == b""


@pytest.mark.parametrize("command", [["plan"], ["run", "train.py"]])
def test_without_torch_one_line_says_so(command: list[str], tmp_path: Path) -> None:
    code = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, NoTorch())
from mindx_elastic.cli.main import main
main()
"""
    name, *more = command
    arguments = [sys.executable, "-c", code, name, *([] if name == "run" else [str(tmp_path)]), *more]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mindx-elastic: error: {name} needs torch, which this Python (")
    assert line.endswith("does not have: pip install torch")


def test_ages() -> None:
    ages = {-30: "in future", -0.5: "0 s", 59.6: "60 s", 300: "5 min", 7200: "2 h", 432_000: "5 d"}
    assert {seconds: human_age(seconds) for seconds in ages} == ages


@pytest.mark.parametrize("text", ["", "0B", "-1GiB", "1GB2", "many", "18", "18G", "9999999TiB", "1\u0663GiB"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        parse_size(text)
    assert "--state" in capsys.readouterr().err
