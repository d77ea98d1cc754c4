"""The command line, taken apart as torchrun does it."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from mindx_elastic.agent.options import Launch, parse

VALUES = {
    "nnodes": "1",
    "nproc_per_node": "2",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "h:29400",
    "rdzv_id": "7",
    "rdzv_conf": "timeout=9,a=b",
    "max_restarts": "2",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "event_log_handler": "console",
    "role": "trainer",
    "log_dir": "logs",
    "redirects": "3",
    "tee": "0:1",
    "local_ranks_filter": "0",
    "duplicate_stdout_filters": "a,,b",
    "duplicate_stderr_filters": "x",
    "node_rank": "0",
    "master_addr": "localhost",
    "master_port": "2345",
    "local_addr": "localhost",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "7",
}
"""A value for each of torchrun's options that takes one; --logs-specs and --numa-binding want more than a parser."""
SWITCHES = ("standalone", "module", "no_python", "run_path", "virtual_local_rank")


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("#!/bin/sh\n")
    Path("train.py").chmod(0o755)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def torchruns(arguments: list[str]) -> tuple[dict[str, object], list[str]] | None:
    """What torchrun makes of it; None: it leaves with 2."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args = torchrun.parse_args(arguments)
            config, program, rest = torchrun.config_from_args(args)
    except SystemExit:
        return None
    return vars(config), [str(program), *map(str, rest)]


def ours(arguments: list[str]) -> Launch | None:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return parse(arguments)
    except SystemExit:
        return None


def spellings() -> list[list[str]]:
    """Each option of torchrun in both spellings and every abbreviation, its value behind "=" and behind a space."""
    lines, seen = [], set()
    for action in torchrun.get_args_parser()._actions:
        for name in action.option_strings:
            for length in range(3 if name.startswith("--") else 2, len(name) + 1):
                short = name[:length]
                if short in seen or action.dest not in (*VALUES, *SWITCHES):
                    continue
                seen.add(short)
                if action.dest in SWITCHES:
                    lines.append([short, "./train.py", "--x"])
                else:
                    joined = f"{short}=" if short.startswith("--") else short
                    lines.append([short, VALUES[action.dest], "train.py", "--x"])
                    lines.append([f"{joined}{VALUES[action.dest]}", "train.py", "--x"])
    return lines


def test_every_spelling_that_torchrun_takes_means_the_same() -> None:
    lines = spellings()
    known = {action.dest for action in torchrun.get_args_parser()._actions}
    assert set(VALUES) | set(SWITCHES) | {"help", "logs_specs", "numa_binding"} >= known - {
        "training_script",
        "training_script_args",
    }, "a new option of torchrun"
    compared = 0
    for line in lines:
        theirs, plan = torchruns(line), ours(line)
        if theirs is None:
            # Two spellings of one option make it ambiguous there with some versions of Python; two options do with all.
            continue
        assert plan is not None, line
        config, command = theirs
        skipped = {"logs_specs", "run_id", "rdzv_backend", "rdzv_endpoint", "rdzv_configs"}
        skipped |= {"max_restarts"} if config["max_restarts"] == 0 else set()
        for name in config.keys() - skipped:
            assert getattr(plan.config, name) == config[name], (line, name)
        if config["rdzv_backend"] != "static":
            assert (plan.config.rdzv_backend, plan.config.rdzv_endpoint) == (
                config["rdzv_backend"],
                config["rdzv_endpoint"],
            )
        if not command[0].startswith("<function"):  # --run-path: a function there, a process here
            assert list(plan.command) == command, line
        compared += 1
    assert compared > 300


@pytest.mark.parametrize("word", ["--max-restart", "--max_restart", "--max-r", "--max-"])
def test_an_option_of_ours_makes_none_of_torchrun_s_ambiguous(word: str) -> None:
    for arguments in ([word, "7", "train.py"], [f"{word}=7", "train.py"]):
        plan = parse(arguments)
        assert (plan.config.max_restarts, plan.options.restarts_window_s) == (7, None)


def test_abbreviations_and_underscores_of_ours() -> None:
    options = parse(
        ["--gr", "7", "--max-restarts-w=60", "--crash_loop", "5", "--run_d", "here", "--snap=2", "train.py"]
    ).options
    assert (options.grace_s, options.restarts_window_s, options.crash_loop) == (7, 60, 5)
    assert (options.run_dir, options.snapshot_every) == (Path("here").absolute(), "2")


@pytest.mark.parametrize(
    ("word", "candidates"),
    [
        ("--rdzv", "--rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf"),
        ("--master=x", "--master-addr, --master-port"),
        ("--no", "--no-python, --node-rank"),
        ("--sta", "--standalone, --start-method"),
    ],
)
def test_an_ambiguous_abbreviation_is_refused_with_its_candidates(
    word: str, candidates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse([word, "train.py"])
    assert left.value.code == 2
    assert f"ambiguous option: {word.partition('=')[0]} could match {candidates}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--max", "3"],
        ["--run", "x"],
        ["--s"],
        ["--help"],
        ["-h"],
        ["--grace", "of the script"],
        ["--rdzv-backend=mine", "-m", "-r", "--", "--nnodes", "9"],
    ],
)
def test_what_stands_behind_the_script_is_the_script_s(words: list[str]) -> None:
    plan = parse(["--nnodes", "1", "train.py", "first", *words])
    assert plan.command == (sys.executable, "-u", "train.py", "first", *words)


@pytest.mark.parametrize(
    "line",
    [
        ["--", "train.py", "--x"],
        ["--", "train.py", "--", "x"],
        ["train.py", "--", "--x"],
        ["train.py", "--", "--", "x"],
        ["train.py", "a", "--", "b"],
        ["--nnodes", "1", "--", "train.py", "-h"],
        ["--no-python", "--", "./train.py", "--", "--x"],
        ["-mr3", "some.module"],
        ["-mr", "3", "some.module", "-t"],
        ["-r3", "-t3", "train.py", "-r"],
        ["train.py", ""],
        ["train.py", "-1", "--lr=-1", "-x y"],
        ["--max-restarts", "1", "--max-restarts", "2", "train.py"],
        ["-m", "--max-restarts", "2", "some.module", "--module"],
    ],
)
def test_dashes_and_joined_switches_are_read_as_by_torchrun(line: list[str]) -> None:
    theirs, plan = torchruns(line), parse(line)
    assert theirs is not None and list(plan.command) == theirs[1]


@pytest.mark.parametrize("line", [["--nosuch", "train.py"], ["-z", "train.py"], ["--use-env", "train.py"], ["--"], []])
def test_what_torchrun_does_not_know_is_refused(line: list[str]) -> None:
    assert torchruns(line) is None and ours(line) is None
