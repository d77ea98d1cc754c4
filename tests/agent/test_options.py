"""The command line of ``mindx-elastic run``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from mindx_elastic.agent import options as options_module
from mindx_elastic.agent.options import DEFAULT_MAX_RESTARTS, Launch, check_options, parse
from mindx_elastic.errors import UsageError


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("#!/bin/sh\n")
    Path("train.py").chmod(0o755)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = ("MINDX_GRACE_S", "MINDX_SNAPSHOT_EVERY", "PET_MAX_RESTARTS", "PYTHON_EXEC")
    for name in (*names, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def known(option: str) -> pytest.MarkDecorator:
    there = {name for action in torchrun.get_args_parser()._actions for name in action.option_strings}
    return pytest.mark.skipif(option not in there, reason=f"this torch has no {option}")


def needs(option: str, value: str, message: str) -> Any:
    """A case of an option that not every torch has."""
    return pytest.param([option, value, "train.py"], message, marks=known(option))


def read(*arguments: str) -> Launch:
    return parse([*arguments, "train.py", "--epochs", "3", "--grace", "of the script"])


def test_what_holds_without_options_and_what_ours_say(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read()
    assert plan.command == (sys.executable, "-u", "train.py", "--epochs", "3", "--grace", "of the script")
    assert (plan.config.max_restarts, plan.config.nproc_per_node) == (DEFAULT_MAX_RESTARTS, 1)
    assert (plan.config.rdzv_backend, plan.config.rdzv_endpoint) == ("c10d", "localhost:0")
    options = plan.options
    assert (options.grace_s, options.tell_grace, options.restarts_window_s) == (30.0, False, None)
    assert (options.snapshot_every, options.hang_timeout_s, options.crash_loop) == ("auto", None, 3)
    assert options.run_dir == Path("mindx-run").absolute() and options.run_dir.is_dir()
    words = ["--grace", "7", "--snapshot-every", "4", "--hang-timeout", "0", "--run-dir", "elsewhere/run"]
    plan = read(*words, "--max-restarts-window", "600", "--crash-loop", "5", "--max_restarts=0")
    options = plan.options
    assert (options.grace_s, options.tell_grace, options.restarts_window_s) == (7.0, True, 600.0)
    assert (options.snapshot_every, options.hang_timeout_s, options.crash_loop) == ("4", 0.0, 5)
    assert (options.run_dir, plan.config.max_restarts) == (Path("elsewhere/run").absolute(), 0)
    monkeypatch.setenv("MINDX_SNAPSHOT_EVERY", "6")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    assert (read().options.snapshot_every, read().config.max_restarts) == ("6", 2)


def test_the_key_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cannot be used is found before anything is started."""
    monkeypatch.delenv("MINDX_JOB_KEY", raising=False)
    monkeypatch.delenv("MINDX_JOB_KEY_FILE", raising=False)
    assert read().options.job_key_file is None
    file = tmp_path / "key"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    assert read("--job-key-file", "key").options.job_key_file == file
    monkeypatch.setenv("MINDX_JOB_KEY_FILE", "key")
    assert read().options.job_key_file == file
    file.chmod(0o644)
    with pytest.raises(UsageError, match=r"--job-key-file=.*key .*chmod 600"):
        read("--job-key-file", "key")
    with pytest.raises(UsageError, match="variable MINDX_JOB_KEY_FILE"):
        read()
    monkeypatch.setenv("MINDX_JOB_KEY", "goes before the file")
    assert read().options.job_key_file is None


@known("--shutdown-timeout")
def test_where_the_grace_period_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_GRACE_S", "50")
    assert read().options.grace_s == 50
    assert not read().options.tell_grace, "the workers have the same variable"
    assert read("--shutdown-timeout", "9").options.grace_s == 9
    assert read("--shutdown-timeout", "9", "--grace", "8").options.grace_s == 8
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "70")
    assert read().options.grace_s == 50
    monkeypatch.delenv("MINDX_GRACE_S")
    assert (read().options.grace_s, read().options.tell_grace) == (70, False)
    assert read("--shutdown-timeout", "9").options.grace_s == 9
    assert read("--shutdown-timeout", "0").options.grace_s == 0.5, "no time at all is the shortest"


def test_one_node_always_gets_a_fresh_rendezvous() -> None:
    plan = read("--master-port", "29999", "--master-addr", "localhost", "--rdzv-id", "mine")
    assert plan.master == ("localhost", 29999)
    assert (plan.config.rdzv_backend, plan.config.rdzv_endpoint, plan.config.run_id) == ("c10d", "localhost:0", "mine")
    two = read("--nnodes", "2", "--node-rank", "1", "--master-addr", "localhost", "--master-port", "29999")
    assert two.master is None
    assert (two.config.rdzv_backend, two.config.rdzv_endpoint) == ("static", "localhost:29999")
    assert read("--standalone", "--master-port", "1").config.rdzv_endpoint == "localhost:0"


def test_modules_programs_and_paths() -> None:
    assert parse(["-m", "some.module", "x"]).command == (sys.executable, "-u", "-m", "some.module", "x")
    assert parse(["--no-python", "true", "x"]).command == ("true", "x")
    assert parse(["--run-path", "train.py", "x"]).command == (sys.executable, "-u", "train.py", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "missing.py: no such file"),
        (["--no-python", "no-such-program"], "no such program"),
        (["--nnodes", "2:1", "train.py"], "min_nodes|--nnodes 2:1"),
        (["--nnodes", "many", "train.py"], "many"),
        (["-m", "--no-python", "train.py"], "--no-python"),
        (["--redirects", "9", "train.py"], "9"),
        (["--run-dir", "train.py/run", "train.py"], "--run-dir"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: .* at least 1"),
        (["--monitor-interval", "nan", "train.py"], "--monitor-interval nan"),
        needs("--event-log-handler", "nosuch", "--event-log-handler nosuch"),
        needs("--signals-to-handle", "SIGTERM,SIGKILL", "--signals-to-handle SIGKILL"),
        needs("--shutdown-timeout", "-1", "--shutdown-timeout -1"),
        (["-"], "stdin"),
        (
            ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "json"],
            "localhost:0: .* give one",
        ),
        (
            ["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "node0:2379", "-m", "json"],
            "--rdzv-backend c10d",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(arguments)


def test_the_options_of_a_job_of_one_node_are_looked_at_without_a_script() -> None:
    check_options(["--nproc-per-node", "1", "--snapshot-every", "4"])
    for wrong in (["--nproc-per-node", "0"], ["--nnodes", "2"], ["-m"], ["--nosuch"], ["--grace", "0"], ["-h"], ["x"]):
        with pytest.raises(UsageError):
            check_options(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"),
        ("PET_STANDALONE", "yes"),
        ("PET_NPROC_PER_NODE", "0"),
    ],
)
def test_a_variable_that_cannot_work_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name if name != "PET_NPROC_PER_NODE" else "--nproc-per-node 0"):
        read()


# --- the command line, taken apart as torchrun does it ---


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
    "log_line_prefix_template": "${rank}",
}
"""A value for each of torchrun's options that takes one; --logs-specs and --numa-binding want more than a parser."""
SWITCHES = ("standalone", "module", "no_python", "run_path", "virtual_local_rank")


def torchruns(arguments: list[str]) -> tuple[dict[str, object], list[str]]:
    """What torchrun makes of it. Without a log directory it would make a temporary folder."""
    args = torchrun.parse_args(arguments)
    args.log_dir = args.log_dir or "torchrun-logs"
    config, program, rest = torchrun.config_from_args(args)
    return vars(config), [str(program), *map(str, rest)]


def spellings() -> list[list[str]]:
    """Each option of torchrun in both spellings, its value behind "=" and behind a space."""
    lines = []
    for action in torchrun.get_args_parser()._actions:
        for name in action.option_strings:
            if action.dest in SWITCHES:
                lines.append([name, "./train.py", "--x"])
            elif action.dest in VALUES:
                joined = f"{name}=" if name.startswith("--") else name
                lines.append([name, VALUES[action.dest], "train.py", "--x"])
                lines.append([f"{joined}{VALUES[action.dest]}", "train.py", "--x"])
    return lines


def test_every_spelling_that_torchrun_takes_means_the_same() -> None:
    lines = spellings()
    known = {action.dest for action in torchrun.get_args_parser()._actions}
    assert set(VALUES) | set(SWITCHES) | {"help", "logs_specs", "numa_binding", "print_completion"} >= known - {
        "training_script",
        "training_script_args",
    }, "a new option of torchrun"
    for line in lines:
        (config, command), plan = torchruns(line), parse(line)
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


WRONG = [["--grace", "0"], ["--hang-timeout", "nan"], ["--crash-loop", "x"], ["--snapshot-every", "1.5"]]
ABBREVIATED = [["--max-restart", "2"], ["--rdzv=x"], ["--snap", "4"]]


@pytest.mark.parametrize("line", [*WRONG, *ABBREVIATED, ["--use-env"], []], ids=str)
def test_wrong_values_abbreviations_and_what_is_unknown_leave_with_2(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse([*line, "train.py"] if line else [])
    assert left.value.code == 2 and "mindx-elastic run: error:" in capsys.readouterr().err


def test_what_stands_behind_the_script_is_the_script_s() -> None:
    """Where torchrun takes abbreviations, also there."""
    words = ["first", "--max", "3", "--s", "--grace", "of the script", "-h", "--help"]
    assert parse(["--nnodes", "1", "train.py", *words]).command == (sys.executable, "-u", "train.py", *words)


@pytest.mark.parametrize("default", [None, 29500])
def test_a_port_that_nobody_has_given_is_free(monkeypatch: pytest.MonkeyPatch, default: int | None) -> None:
    """torch's parsers before 2.13 have a number as default, which is not the user's."""
    make = getattr(options_module, "get_args_parser")  # noqa: B009

    def as_torch_does() -> ArgumentParser:
        parser: ArgumentParser = make()
        parser.set_defaults(master_port=default)
        return parser

    monkeypatch.setattr(options_module, "get_args_parser", as_torch_does)
    monkeypatch.delenv("PET_MASTER_PORT", raising=False)
    assert read().master is None
    fixed = read("--master-port", "29500").master
    assert fixed is not None and fixed[1] == 29500
