"""Refusals and notes over the life of a guard: caught ones, evaluations, saves, resumes, `Model` and its callbacks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindx_elastic.errors import UnmanagedStateError
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.format import read_header
from mindx_elastic.train import Callback, ExceptionCheckpoint
from tests.guarded import Job, stop_and_wait
from tests.harness import events
from tests.train.small_job import make_loader, make_model

pytestmark = pytest.mark.usefixtures("clean")


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


class Target:
    """A network that follows another in steps of `every`, as in Q-learning."""

    def __init__(self, job: Job, every: int) -> None:
        self.network, self.every = copy.deepcopy(job.network), every

    def after(self, job: Job, step: int) -> None:
        if step % self.every == 0:
            self.network.load_state_dict(job.network.state_dict())


# --- what is caught ---


class Wrapped(Exception):
    """Made of a refusal."""


@pytest.mark.parametrize(
    ("error", "raised"), [(None, UnmanagedStateError), (SystemExit(0), UnmanagedStateError), (Wrapped(), Wrapped)]
)
def test_a_refusal_that_the_program_catches_is_none_the_less_one(
    tmp_path: Path, error: BaseException | None, raised: type[BaseException]
) -> None:
    """It comes again at each boundary, nothing is saved, and ``sys.exit(0)`` does not tell a launcher that all is
    done."""
    job = Job(tmp_path)
    rng, caught = np.random.default_rng(0), 0
    with pytest.raises(raised), job.guard as guard:  # noqa: PT012
        while guard.position.step < 12:
            job.network(torch.randn(5, 4) + float(rng.normal())).square().mean().backward()
            job.optimizer.step()
            job.scheduler.step()
            job.optimizer.zero_grad()
            try:
                guard.step_end()
            except UnmanagedStateError:
                caught += 1
                if error is not None:
                    raise error from None
    assert caught == (1 if error else 10), "from the third boundary on"
    assert files(tmp_path) == []


# --- when ---


def test_what_changes_before_an_evaluation_counts(tmp_path: Path) -> None:
    job = Job(tmp_path)
    target = Target(job, 2)

    def after(job: Job, step: int) -> None:
        with job.guard.outside_step():
            pass

    def middle(job: Job, step: int) -> None:
        target.after(job, step)

    with pytest.raises(UnmanagedStateError, match=r'module "target.network"'):
        job.run(middle=middle, after=after)


# --- notes ---


def test_a_resumed_run_says_what_its_file_says_and_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Job(tmp_path, unmanaged="warn")
    target = Target(first, 1)

    def middle(job: Job, step: int) -> None:
        target.after(job, step)
        if step == 7:
            stop_and_wait(job)

    with pytest.raises(SystemExit):
        first.run(middle=middle)
    (note,) = read_header(files(tmp_path)[0]).info.unmanaged
    caplog.clear()
    second = Job(tmp_path)
    second.run()
    assert second.guard.resumed_from_step == 7
    told = [r for r in caplog.records if "according to its files" in r.getMessage()]
    assert len(told) == 1 and note in told[0].getMessage() and told[0].levelno == logging.WARNING
    (resumed,) = events(tmp_path, "resume")
    assert (resumed["exact"], resumed["unmanaged"]) == (False, [note])
    final = next(path for path in files(tmp_path) if "final" in path.name)
    assert read_header(final).info.unmanaged == (note,)


def test_notes_are_bounded_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    unmanaged = Unmanaged("warn")
    for number in range(100):
        unmanaged.certain(f"thing {number} {'x' * 1000}", "Name it")
        unmanaged.certain(f"thing {number} {'x' * 1000}", "Name it")
    assert len(caplog.records) == 100
    assert len(unmanaged.notes) == 32 and max(map(len, unmanaged.notes)) == 400
    before = unmanaged.notes
    unmanaged.inherit(before)
    assert unmanaged.notes == before


# --- optimizers are loaded in place ---


def test_what_a_program_keeps_of_an_optimizer_is_still_its_own_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        Job(tmp_path).run(middle=lambda job, step: stop_and_wait(job) if step == 3 else None)
    job = Job(tmp_path)
    group, groups, state = job.optimizer.param_groups[0], job.optimizer.param_groups, job.optimizer.state
    job.run()
    assert job.guard.resumed_from_step == 3
    assert job.optimizer.param_groups is groups and groups[0] is group and job.optimizer.state is state
    assert group["lr"] == job.scheduler.get_last_lr()[0]


# --- Model ---


class Average(Callback):
    """An average of the weights in a callback."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.ema = network, copy.deepcopy(network)

    def on_train_step_end(self, run_context: Any) -> None:
        with torch.no_grad():
            for one, other in zip(self.ema.parameters(), self.network.parameters(), strict=True):
                one.lerp_(other, 0.1)


class KeptAverage(Average):
    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.ema.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ema.load_state_dict(state)


def test_a_callback_of_a_model_must_give_its_state(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(UnmanagedStateError, match=r'module "callbacks\[1\].ema"'):
        model.train(3, make_loader(), callbacks=[ExceptionCheckpoint(directory=tmp_path), Average(model.network)])
    assert files(tmp_path) == []
    model = make_model()
    model.train(3, make_loader(), callbacks=[ExceptionCheckpoint(directory=tmp_path), KeptAverage(model.network)])
    (file,) = files(tmp_path)
    assert read_header(file).info.unmanaged == ()
