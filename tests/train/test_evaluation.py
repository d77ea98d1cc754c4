"""An evaluation by itself, beside a training's files: it leaves them, and what lies in memory, alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mindx_elastic as mx
from mindx_elastic import GracefulExit, OnRequestExit
from mindx_elastic.memory.folders import job_folder, rank_folders
from tests.guarded import Job, no_traces, plain_environment, stop_and_wait
from tests.harness import run_job

START_FILES = ("strategy.proto", "resume_plan.json")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    plain_environment(monkeypatch)
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("MINDX_ARENA_DIR", str(tmp_path / "shm"))
    monkeypatch.setenv("MINDX_SNAPSHOT_EVERY", "1")
    with no_traces():
        yield


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A training's directory after two stops: the second start has written what it went on from."""
    for _ in range(2):
        with pytest.raises(GracefulExit):
            Job(tmp_path / "ckpt").run(after=lambda job, step: stop_and_wait(job) if len(job.steps) == 2 else None)
    return tmp_path / "ckpt"


def contents(directory: Path) -> dict[str, bytes]:
    found = {name: (directory / name).read_bytes() for name in START_FILES}
    assert all(found.values())
    return found


def evaluate(directory: Path, how: str) -> None:
    job = Job(directory.parent / "elsewhere")
    if how == "Model.eval":
        model = mx.Model(job.network, torch.nn.CrossEntropyLoss())
        assert model.eval(job.loader, [OnRequestExit(directory=str(directory))])["loss"] > 0
        return
    guard = mx.Guard(model=job.network, directory=directory, prefix="job", resume=how.removeprefix("Guard "))
    with pytest.raises(mx.errors.MindxError, match=r"separate directory|does not fit|another job"):
        guard.open()


HOW = ("Model.eval", "Guard auto", "Guard never")


def test_the_trainings_files_stay_as_they_are(trained: Path) -> None:
    before = contents(trained)
    for how in HOW:
        evaluate(trained, how)
        assert contents(trained) == before, how
    assert Job(trained).run() is not None  # and the training goes on


def test_what_a_killed_training_left_in_memory_stays(tmp_path: Path) -> None:
    """Else whoever looks how far the weights are costs the training all steps since its last file."""
    directory, memory = tmp_path / "ckpt", tmp_path / "shm"
    env: dict[str, str] = {"MINDX_ARENA_DIR": str(memory), "MINDX_SNAPSHOT_EVERY": "1"}
    run_job("loop.py", directory, "--kill", "boundary:5:0", env=env, code=-9)
    assert not list(directory.glob("*.safetensors"))
    for how in HOW:
        evaluate(directory, how)
        assert rank_folders(job_folder(memory, directory.resolve())), how
    resumed = run_job("loop.py", directory, env=env)
    assert {m[1] for m in resumed.matches(r"READY \d+ \d+ (\w+)")} == {"5"}, resumed.report()


@pytest.mark.slow
def test_an_evaluation_of_two_ranks_of_which_one_may_be_asked_to_exit(tmp_path: Path) -> None:
    """Nobody waits for the rank without the callback, nobody is told to wrap in DDP what is only evaluated."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "strategy.proto").write_bytes(b"of the training")
    job = run_job("train_model.py", tmp_path / "ckpt", "--eval-only", ranks=2, env={"MINDX_ARENA_DIR": "none"})
    assert len({m[1] for m in job.matches(r"LOSS \d ([\d.]+)")}) == 1 and len(job.matches("LOSS")) == 2, job.report()
    assert not job.matches("no DDP"), job.report()
    assert (tmp_path / "ckpt" / "strategy.proto").read_bytes() == b"of the training"
