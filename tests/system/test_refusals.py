"""A training that its guard refuses, in real jobs: every rank leaves, nothing is saved, nothing is started again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mindx_elastic.cli.app import app
from mindx_elastic.persist.format import read_header
from tests.harness import JOBS, events, run_job, start_agent, start_job

pytestmark = pytest.mark.slow

_WORDS = 'generator "rng" (Generator, main() in unmanaged.py) draws numbers in the training and is not kept'
_PATTERN = re.escape(_WORDS)


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def ask(*arguments: object) -> Any:
    return json.loads(CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout)


@pytest.mark.parametrize("who", ["1", pytest.param("all", marks=pytest.mark.drill)])
def test_every_rank_leaves_and_nothing_is_saved(tmp_path: Path, who: str) -> None:
    with start_job("ranks.py", 2, JOBS / "unmanaged.py", tmp_path, who, 12) as job:
        assert job.wait() != 0
    assert job.matches(r"UnmanagedStateError: " + _PATTERN), job.report()
    assert not job.matches("DONE") and not job.matches("saved in"), job.report()
    assert files(tmp_path) == []
    outcomes = {event["outcome"] for event in events(tmp_path, "save")}
    assert outcomes == {"refused: state that is not kept"}
    # The corrected program starts over.
    assert run_job("unmanaged.py", tmp_path, "none", 3, ranks=2).matches("READY . .* None")


# --- a rank that cannot enter ---

CLASSES = {
    "environment": ("UsageError", "UsageError"),
    "directory": ("UsageError", "UsageError"),
    "state": ("UnsupportedStateError", "UnsupportedStateError"),
    "optimizer": ("UnmanagedStateError", "UnmanagedStateError"),
    "layout": ("UsageError", "UsageError"),
    "copies": ("UsageError", "UsageError"),
    "last": ("OSError", "PeerStartError"),
}
"""Of the fault on its own rank, and on the others."""


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.drill)])
def test_what_one_rank_cannot_ends_the_start_of_all(tmp_path: Path, ranks: int, victim: int) -> None:
    (tmp_path / "shm").mkdir()
    env = {"MINDX_ARENA_DIR": str(tmp_path / "shm")}
    # Without the news the others would wait for half an hour; the job's own bound is two minutes.
    job = run_job("entering.py", tmp_path / "ckpt", victim, *CLASSES, ranks=ranks, env=env)
    for fault, (own, other) in CLASSES.items():
        told = {int(m[1]): (m[2], m[3]) for m in job.matches(rf"REFUSED {fault} (\d) (\w+) (.*)")}
        assert {rank: kind for rank, (kind, _) in told.items()} == {
            rank: own if rank == victim else other for rank in range(ranks)
        }, f"{fault}\n{job.report()}"
        if fault != "copies":  # all ranks find that out together
            assert all(f"rank {victim}" in text for rank, (_, text) in told.items() if rank != victim), job.report()
    assert len(job.matches("ENTERED")) == ranks, job.report()
    assert not [path for path in (tmp_path / "shm").rglob("*") if path.is_file()], "nothing is kept of it"


@pytest.mark.drill
@pytest.mark.parametrize("who", [pytest.param("all", marks=pytest.mark.drill), "1"])
def test_the_agent_does_not_start_it_again_and_keeps_nothing_of_it(
    tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shm").mkdir()
    env = {"MINDX_ARENA_DIR": str(tmp_path / "shm")}
    options = ["--max-restarts", "5", "--snapshot-every", "1"]
    with start_agent("unmanaged.py", tmp_path / "ckpt", who, 12, ranks=2, options=options, env=env) as job:
        job.expect(1)
    assert len(job.matches("READY")) == 2, job.report()
    assert job.matches("The guard has refused the training") and job.matches(_PATTERN)
    assert files(tmp_path) == [] and list((tmp_path / "shm").rglob("*.safetensors")) == []


@pytest.mark.drill
def test_with_warnings_one_ranks_note_is_in_its_files_and_in_the_plan(tmp_path: Path) -> None:
    env = {"MINDX_UNMANAGED": "warn"}
    job = run_job("unmanaged.py", tmp_path, "1", 12, ranks=2, env=env)
    assert len(job.matches(_PATTERN)) == 1, job.report()
    notes = {read_header(path).info.rank: read_header(path).info.unmanaged for path in files(tmp_path)}
    assert notes == {0: (), 1: (_WORDS,)}
    plan = ask("plan", tmp_path)
    assert (plan["exact"], plan["inexact"], plan["step"]) == (False, [_WORDS], 12)
    (step,) = ask("inspect", tmp_path)["steps"]
    assert (step["complete"], step["unmanaged"]) == (True, [_WORDS])
    shown = CliRunner().invoke(app, ["plan", str(tmp_path)], env={"COLUMNS": "300"}).stdout
    assert f"exact     no: {_WORDS}" in shown
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "300"}).stdout
    assert f"not exact from step 12: {_WORDS}" in shown
    # What the weights have gone through stays true of them, on every rank.
    again = run_job("unmanaged.py", tmp_path, "none", 14, ranks=2, env=env)
    assert again.matches("not bit for bit the uninterrupted run, according to its files: generator"), again.report()
    newest = [read_header(path).info for path in files(tmp_path)]
    assert {info.rank: info.unmanaged for info in newest if info.step == 14} == {0: (_WORDS,), 1: (_WORDS,)}
    assert [event["exact"] for event in events(tmp_path, "resume")] == [False, False]


@pytest.mark.drill
@pytest.mark.parametrize("scenario", ["in_join", "own_lengths"])
def test_equal_steps_of_the_ranks_are_free(tmp_path: Path, scenario: str) -> None:
    job = run_job("scenarios.py", tmp_path / "ckpt", scenario, ranks=2)
    assert len(job.matches("DONE")) == 2 and not job.matches("WARNING"), job.report()
    assert bool(job.matches("no boundary in common to stop at")) == (scenario == "in_join")
