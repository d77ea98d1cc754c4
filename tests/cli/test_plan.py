"""``mindx-elastic plan`` on real files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.persist.storage import quarantine
from tests.checkpoint_files import cut_off_end, flip_bit_in_data, write, write_step
from tests.cli.conftest import Run

REPLICAS = {"replicas": 4}


@pytest.fixture(autouse=True)
def _no_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine that the tests run on."""
    monkeypatch.setenv("MINDX_FAULT_DIR", str(tmp_path / "no faults"))
    monkeypatch.setenv("MINDX_RESET_DIR", str(tmp_path / "no resets"))


@pytest.fixture
def ddp(tmp_path: Path) -> Path:
    """Four replicas: step 10 periodic, step 17 saved at a stop."""
    root = tmp_path / "ckpt"
    write_step(root, 10, world_size=4, coordinates=REPLICAS)
    stopped = {"kind": "breakpoint", "reason": "SIGTERM", "coordinates": REPLICAS}
    write_step(root, 17, world_size=4, name="resnet-2_7_breakpoint.safetensors", **stopped)
    return root


def stop(root: Path, rank: int) -> Path:
    return root / f"rank_{rank}" / "resnet-2_7_breakpoint.safetensors"


def document(run: Run, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("plan", *words, "--json").stdout)
    return found


# --- restorable ---


def test_the_simplest_plan(run: Run, ddp: Path) -> None:
    result = run("plan", ddp)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "RESTORABLE from run run-a step 17"
    text = result.stdout
    for part in (
        "saved     2023-11-14 22:13:37 UTC, ",
        "ago: breakpoint (SIGTERM)",
        "position  epoch 2, step 7 in it",
        "exact     not proved yet",
        "lost      nothing",
        "world     4 ranks, as before",
        "digests   checked: 4 files, ",
        "restore   RESTORE_RANKS=0",
        "0-3    own file  11.8 KiB  rank_0/resnet-2_7_breakpoint.safetensors and others",
        "4 ranks, 47.3 KiB to read in all",
    ):
        assert part in text, part
    assert "not used" not in text


def test_a_damaged_file_is_found_and_planned_around(run: Run, ddp: Path) -> None:
    flip_bit_in_data(stop(ddp, 0))
    before = sorted(ddp.rglob("*"))
    found = document(run, ddp)
    assert sorted(ddp.rglob("*")) == before, "nothing is written unless asked for"
    assert (found["step"], found["ranks"][0]["donor"], found["restore_ranks"]) == (17, 1, "1")
    assert found["digests_checked"] and found["checked_files"] == 4
    (rejected,) = found["rejected"]
    assert rejected["what"] == "rank_0/resnet-2_7_breakpoint.safetensors" and "model.bias" in rejected["reason"]
    assert "does not match its digest" in run("plan", ddp).stdout
    trusting = document(run, ddp, "--no-verify")
    assert trusting["ranks"][0]["donor"] is None and not trusting["digests_checked"]
    assert "NOT checked" in run("plan", ddp, "--no-verify").stdout


def test_it_falls_back_and_counts_what_is_lost(run: Run, ddp: Path) -> None:
    for rank in range(4):
        flip_bit_in_data(stop(ddp, rank))
    result = run("plan", ddp)
    assert result.exit_code == 0 and "RESTORABLE from run run-a step 10" in result.stdout
    assert "lost      7 steps: up to 17 had been seen" in result.stdout
    assert "RESTORE_RANKS=-1" in result.stdout
    assert document(run, ddp)["steps_lost"] == 7


def test_one_step_only(run: Run, ddp: Path) -> None:
    found = document(run, ddp, "--step", 10)
    assert (found["step"], found["steps_lost"]) == (10, 7)
    result = run("plan", ddp, "--step", 11)
    assert result.exit_code == 1 and "steps that are there: 17, 10" in result.stdout
    assert "leave out --step" in result.stdout
    write_step(ddp, 3, world_size=4, run_id="old", created=1e9, coordinates=REPLICAS, name="old-1_3.safetensors")
    assert document(run, ddp)["run_id"] == "run-a"


@pytest.mark.parametrize(
    ("options", "found", "said"),
    [
        (
            ["--fault-ranks", "0,2"],
            {"faults": [0, 2], "restore_ranks_map": {"0,1,2,3": 1}},
            "faults    ranks 0, 2 (--fault-ranks)",
        ),
        (["--fault-ranks", "0-3"], {"step": 10, "restore_ranks": "-1"}, "lost      7 steps"),
        (["--world-size", "2"], {"resharded": True, "checked_files": 2}, "world     4 ranks become 2 ranks"),
    ],
)
def test_other_ranks(run: Run, ddp: Path, options: list[str], found: dict[str, Any], said: str) -> None:
    planned = document(run, ddp, *options)
    assert {name: planned[name] for name in found} == found and said in run("plan", ddp, *options).stdout


def test_a_report_of_the_platform(run: Run, ddp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / "fault-npus").write_text('{"FaultRankIds": ["1"], "CreatTime": 1690000000}')
    assert document(run, ddp, "--faults", folder)["faults"] == [1]
    assert document(run, ddp)["faults"] == []
    monkeypatch.setenv("MINDX_FAULT_DIR", str(folder))
    found = document(run, ddp)
    assert found["faults"] == [1] and str(folder) in found["faults_from"]
    assert document(run, ddp, "--faults", "none")["faults"] == []


# --- what is written ---


def test_files_for_scripts(run: Run, ddp: Path, tmp_path: Path) -> None:
    env = tmp_path / "resume.sh"
    assert run("plan", ddp, "--emit-env", env, "--write").exit_code == 0
    script = f'. {env}; printf "%s %s" "$RESTORE_RANKS" "$MINDX_RESUME_STEP"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "0 17"
    saved = json.loads((ddp / "resume_plan.json").read_text())
    assert saved["step"] == 17
    assert saved["ranks"][3]["path"] == "rank_3/resnet-2_7_breakpoint.safetensors"
    assert run("inspect", ddp).exit_code == 0 and "resume_plan" not in run("inspect", ddp).stdout
    for rank in range(4):
        for path in (ddp / f"rank_{rank}").iterdir():
            cut_off_end(path)
    assert run("plan", ddp, "--emit-env", env, "--write").exit_code == 1
    assert (
        not json.loads((ddp / "resume_plan.json").read_text())["restorable"] and "RESTORE_RANKS=-1\n" in env.read_text()
    )


# --- nothing, or nothing that can be used ---


def all_damaged(folder: Path) -> None:
    flip_bit_in_data(write(folder / "a-1_1.safetensors"))


def in_quarantine(folder: Path) -> None:
    quarantine(write(folder / "a-1_1.safetensors"), "damaged", folder)


def of_an_evaluation(folder: Path) -> None:
    write(folder / "a_eval.safetensors", kind="eval", resumable=False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (all_damaged, "does not match its digest"),
        (in_quarantine, "quarantine: 1 file that could not be used"),
        (of_an_evaluation, "is not meant for resuming (eval)"),
    ],
)
def test_what_is_no_fresh_start(run: Run, tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    make(tmp_path / "ckpt")
    result = run("plan", tmp_path / "ckpt")
    assert result.exit_code == 1 and said in result.stdout


# --- bad input ---


@pytest.mark.parametrize(
    "options",
    [["--fault-ranks", "4"], ["--emit-env", "/proc/no/such"]],
)
def test_wrong_usage_is_2(run: Run, ddp: Path, options: list[str]) -> None:
    result = run("plan", ddp, *options)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("content", ["", '{"FaultRankIds": ["9"]}', '{"FaultRankIds": "all"}'])
def test_malformed_reports(run: Run, ddp: Path, tmp_path: Path, content: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    result = run("plan", ddp, "--faults", file)
    assert result.exit_code == 2 and str(file) in result.stderr


def test_the_first_start_of_a_start_script_has_no_directory_yet(run: Run, tmp_path: Path) -> None:
    """The documented one: ``case $? in 0|3) ;; *) exit 1``."""
    result = run("plan", tmp_path / "ckpt", "--emit-env", tmp_path / "env.sh")
    assert result.exit_code == 3 and "no checkpoint found" in result.stdout
    assert "RESTORE_RANKS=-1" in (tmp_path / "env.sh").read_text()
    assert run("plan", tmp_path / "ckpt").exit_code == 2


def test_fields_that_a_terminal_would_obey(run: Run, tmp_path: Path) -> None:
    evil = "\x1b[2J[bold]x\n"
    write(tmp_path / "ckpt" / "a-1_5.safetensors", run_id=evil, reason=evil, created=1e300)
    result = run("plan", tmp_path / "ckpt", "--emit-env", tmp_path / "env.sh")
    assert result.exit_code == 0 and "\x1b" not in result.stdout and "\\x1b[2J[bold]x\\n" in result.stdout
    assert "a time that no calendar has" in result.stdout
    assert "\x1b" not in (tmp_path / "env.sh").read_text()
