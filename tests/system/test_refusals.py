"""A training that its guard refuses, in real jobs: every rank leaves, nothing is saved, nothing is started again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mindx_elastic.cli.main import app
from mindx_elastic.persist.format import read_header
from tests.harness import events, run_job, start_agent, start_job

pytestmark = pytest.mark.slow

_WORDS = 'generator "rng" (Generator, main() in unmanaged.py) draws numbers in the training and is not kept'
_PATTERN = re.escape(_WORDS)


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def ask(*arguments: object) -> Any:
    return json.loads(CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout)


@pytest.mark.parametrize("who", ["1", pytest.param("all", marks=pytest.mark.drill)])
def test_every_rank_leaves_and_nothing_is_saved(tmp_path: Path, who: str) -> None:
    with start_job("ranks.py", 2, Path(__file__).parents[1] / "jobs" / "unmanaged.py", tmp_path, who, 12) as job:
        assert job.wait() != 0
    assert job.matches(r"UnmanagedStateError: " + _PATTERN), job.report()
    assert not job.matches("DONE") and not job.matches("saved in"), job.report()
    assert files(tmp_path) == []
    outcomes = {event["outcome"] for event in events(tmp_path, "save")}
    assert outcomes == {"refused: state that is not kept"}
    # The corrected program starts over.
    assert run_job("unmanaged.py", tmp_path, "none", 3, ranks=2).matches("READY . .* None")


def test_an_error_of_one_rank_at_entry_is_raised_on_all(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    script, env = Path(__file__).parents[1] / "jobs" / "unmanaged.py", {"MINDX_ARENA_DIR": str(shm)}
    with start_job("ranks.py", 2, script, tmp_path, "entry", 12, env=env) as job:
        assert job.wait() != 0
    said = 'UnmanagedStateError: (rank 1: )?optimizer "optimizer" trains 1 parameter that none of the guard'
    assert len(job.matches(said)) == 2, job.report()
    assert not job.matches("READY") and files(tmp_path) == []
    assert not [path for path in shm.rglob("*") if path.is_file()], "nothing is kept where there is nothing"


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
    assert f"NO: {_WORDS}" in shown
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "300"}).stdout
    assert f"not exact from step 12: {_WORDS}" in shown
    # What the weights have gone through stays true of them, on every rank.
    again = run_job("unmanaged.py", tmp_path, "none", 14, ranks=2, env=env)
    assert again.matches("not bit for bit the uninterrupted run, according to its files: generator"), again.report()
    newest = [read_header(path).info for path in files(tmp_path)]
    assert {info.rank: info.unmanaged for info in newest if info.step == 14} == {0: (_WORDS,), 1: (_WORDS,)}
    assert [event["exact"] for event in events(tmp_path, "resume")] == [False, False]


@pytest.mark.drill
@pytest.mark.parametrize("how", ["join", "steps"])
def test_equal_steps_of_the_ranks_are_free(tmp_path: Path, how: str) -> None:
    job = run_job("uneven_join.py", tmp_path, how, ranks=2)
    assert len(job.matches("DONE")) == 2 and not job.matches("WARNING"), job.report()
    assert len(job.matches("no boundary in common to stop at")) == 2 * (how == "join")
