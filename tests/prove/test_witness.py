"""What a guard notes under `mindx-elastic prove`, and that it notes nothing without it."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.prove import proof_witness
from mindx_elastic.prove.control import Control, PlannedStop
from mindx_elastic.prove.records import ProcessRecord, of_kinds, read_lives
from tests.guarded import STEPS_PER_EPOCH, Job

Begin = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_exit(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atexit, "register", lambda *arguments: None)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Begin a run of a proof, as a process of its own would; returns the folder of its witnesses."""
    numbers = itertools.count()

    def make(**control: Any) -> Path:
        for name, value in (("_series", []), ("_entered", {}), ("_passed", itertools.count(1))):
            monkeypatch.setattr(proof_witness, name, value)
        folder = tmp_path / "proof" / f"run_{next(numbers)}"
        folder.mkdir(parents=True)
        (tmp_path / "proof/directories").mkdir(exist_ok=True)
        told = Control(folder=folder, directories=tmp_path / "proof/directories", **control)
        monkeypatch.setenv("MINDX_PROVE", str(told.write(folder / "control.json")))
        return folder

    return make


def life_of(folder: Path) -> ProcessRecord:
    (found,) = read_lives(folder)
    return found


def run_to_the_end_of_the_proof(job: Job, **options: Any) -> None:
    with pytest.raises(SystemExit) as left:
        job.run(**options)
    assert not left.value.code


def test_each_place_of_a_step_is_noted(tmp_path: Path, begin: Begin) -> None:
    folder = begin()
    Job(tmp_path / "ckpt").run(2)
    life = life_of(folder)
    assert (life.outcome, life.resumed, len(life.steps)) == ("finished", None, 2 * STEPS_PER_EPOCH)
    assert not (tmp_path / "ckpt").exists(), "the directory is another one"
    assert [(step.epoch, step.step_in_epoch) for step in life.steps[4:6]] == [(1, 5), (2, 1)]
    one, two = life.steps[:2]
    assert one.begin is not None and two.begin is not None
    assert {"stream|torch", "stream|python", "stream|numpy"} <= set(one.begin)
    assert one.end["stream|torch"] != one.begin["stream|torch"], "dropout"
    assert one.end["calls|model"] == "1" and one.end["batch|model"] != two.end["batch|model"]
    assert one.begin["weights|model.0.weight"] == life.entered["weights|model.0.weight"]
    assert one.end["weights|model.0.weight"] != one.begin["weights|model.0.weight"]
    assert two.begin["weights|model.0.weight"] == one.end["weights|model.0.weight"]
    assert one.end["flag|model.1.training"] == "True" and "scalar|loss" in one.end
    assert {key.partition("|")[0] for key in one.end} >= {"weights", "optimizer", "option", "stateful", "flag"}
    assert one.end["option|optimizer lr"] != two.end["option|optimizer lr"], "the scheduler's"


def test_a_module_in_evaluation_mode_counts_for_no_step(tmp_path: Path, begin: Begin) -> None:
    def evaluate(job: Job, step: int) -> None:
        with job.guard.outside_step():
            job.network(torch.ones(4, 4))

    folders = [begin()]
    Job(tmp_path / "one").run(1)
    folders.append(begin())
    Job(tmp_path / "two").run(1, after=evaluate)
    one, two = (life_of(folder) for folder in folders)
    given = [[(step.end["calls|model"], step.end["batch|model"]) for step in life.steps] for life in (one, two)]
    assert given[0] == given[1]


def test_a_frozen_layer_and_a_buffer_that_is_not_saved_are_seen(tmp_path: Path, begin: Begin) -> None:
    def freeze(job: Job, step: int) -> None:
        if step == 3:
            job.network[1].eval()
            job.network[0].weight.requires_grad_(False)
        job.network.count.add_(1)  # type: ignore[operator]

    folder = begin()
    job = Job(tmp_path / "ckpt")
    job.network.register_buffer("count", torch.zeros(()), persistent=False)
    job.run(1, middle=freeze)
    two, three = life_of(folder).steps[1:3]
    for key in ("flag|model.1.training", "flag|model.0.weight.requires_grad"):
        assert (two.end[key], three.end[key]) == ("True", "False")
    assert two.end["weights|model.count"] != three.end["weights|model.count"]


def test_the_run_ends_where_it_is_told_to_and_saves_nothing(tmp_path: Path, begin: Begin) -> None:
    folder = begin(steps=7)
    run_to_the_end_of_the_proof(Job(tmp_path / "ckpt"))
    life = life_of(folder)
    assert (life.outcome, len(life.steps)) == ("ended", 7)
    assert not list((tmp_path / "proof").rglob("*.safetensors"))


def test_a_stop_comes_at_its_boundary_and_the_next_run_goes_on(tmp_path: Path, begin: Begin) -> None:
    folder = begin(alarm=PlannedStop(series=0, step=6, rank=0), last=(0, 9))
    with pytest.raises(SystemExit):
        Job(tmp_path / "ckpt").run()
    stopped = life_of(folder)
    assert (stopped.alarm, len(stopped.steps)) == (6, 6)
    resumed_folder = begin(last=(0, 9))
    run_to_the_end_of_the_proof(Job(tmp_path / "ckpt", seed=5))
    resumed = life_of(resumed_folder)
    assert (resumed.resumed, [step.number for step in resumed.steps]) == (6, [7, 8, 9])
    assert resumed.directory == stopped.directory == str(tmp_path / "ckpt"), "as the program names it"
    assert not (tmp_path / "ckpt").exists()
    saved = of_kinds(stopped.steps[-1].end, "weights", "option", "optimizer", "stateful")
    assert {key: resumed.entered.get(key) for key in saved} == saved


def test_the_weights_at_the_exit_are_those_of_the_script_s_end(tmp_path: Path, begin: Begin) -> None:
    folder = begin()
    job = Job(tmp_path / "ckpt")
    job.run(1)
    with torch.no_grad():
        next(job.network.parameters()).zero_()
    (entered,) = proof_witness._entered.values()
    entered.at_exit()
    life = life_of(folder)
    assert life.exit["exit|model.0.bias"] == life.steps[-1].end["weights|model.0.bias"]
    assert life.exit["exit|model.0.weight"] != life.steps[-1].end["weights|model.0.weight"]
