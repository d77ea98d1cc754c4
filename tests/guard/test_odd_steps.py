"""A step whose loss is no number: what is refused, what is told, and that it is made again from the boundary before."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.errors import OddStepError, UsageError

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("MINDX_ARENA_DIR", str(tmp_path / "shm"))


class Run:
    """One process's training, up to `steps` steps; `given`: what `step_end` is given at some of them."""

    def __init__(self, folder: Path, given: dict[int, dict[str, Any]], steps: int = 5, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"odd": "back", "snapshot_every": 1, **options}
        guard = mx.Guard(model=self.model, optimizer=optimizer, directory=folder / "ckpt", **options)
        with guard:
            self.resumed = guard.resumed_from_step
            for step in guard.steps(steps):
                loss = self.model(torch.randn(3, 2)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                guard.step_end(**{"loss": loss, **given.get(step, {})})

    @property
    def weights(self) -> list[float]:
        return list(self.model.weight.detach().flatten().tolist())


def verdicts(folder: Path) -> list[tuple[int, str]]:
    content = json.loads((folder / "ckpt" / "odd_steps_rank_0.json").read_text())
    return [(each["step"], each["verdict"]) for each in content["steps"]]


def note_of_rank_1(folder: Path, **said: Any) -> None:
    """What another rank has noted in the first attempt of this run."""
    event = json.loads((folder / "ckpt" / "events.jsonl").read_text().splitlines()[0])
    step = {"run_id": event["run_id"], "attempt": 0, "rank": 1, "what": "loss nan", **said}
    (folder / "ckpt" / "odd_steps_rank_1.json").write_text(json.dumps({"steps": [step]}))


@pytest.mark.parametrize(
    "odd",
    [
        {"loss": NAN},
        {"loss": -INF},
        {"loss": torch.tensor([1.0, INF])},
        {"loss": np.float32(NAN)},
        {"grad_norm": torch.tensor(NAN)},
        {"loss": torch.tensor(NAN, dtype=torch.bfloat16, requires_grad=True)},
        {"loss": torch.tensor(NAN).to(torch.float8_e4m3fn)},
    ],
    ids=["nan", "infinite", "tensor", "numpy", "gradient norm", "bfloat16", "float8"],
)
def test_a_step_that_is_odd_once_is_made_again(
    tmp_path: Path, odd: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    whole = Run(tmp_path / "whole", {})
    with pytest.raises(
        OddStepError, match=r"^step 3: (loss|grad_norm) (nan|-?inf) on rank 0; a start goes on at step 2"
    ):
        Run(tmp_path, {3: odd})
    assert verdicts(tmp_path) == [(3, "open")]
    again = Run(tmp_path, {})
    assert (again.resumed, again.weights, verdicts(tmp_path)) == (2, whole.weights, [(3, "other")])
    assert "is not when made again: suspect that rank's device" in caplog.text


def test_a_step_that_is_odd_again_is_the_programs_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And so are those that come of it: nobody goes back from them."""
    odd = {step: {"loss": NAN} for step in (3, 4)}
    with pytest.raises(OddStepError):
        Run(tmp_path, odd)
    again = Run(tmp_path, odd)
    assert (again.resumed, verdicts(tmp_path)) == (2, [(3, "own")])
    assert caplog.text.count("it is the program's own; the training goes on") == 1


def test_another_odd_step_is_made_again_too(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", {})
    with pytest.raises(OddStepError):
        Run(tmp_path, {3: {"loss": NAN}})
    with pytest.raises(OddStepError, match="step 5"):
        Run(tmp_path, {3: {"loss": NAN}, 5: {"loss": NAN}})
    again = Run(tmp_path, {})
    assert (again.resumed, again.weights, verdicts(tmp_path)) == (4, whole.weights, [(3, "own"), (5, "other")])


def test_stop_ends_the_job_and_the_next_start_goes_on_before_the_step(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", {})
    for words in ("makes it again", "it is the program's own. The next start goes on at step 2"):
        with pytest.raises(OddStepError, match=words):
            Run(tmp_path, {3: {"loss": NAN}}, odd="stop")
    again = Run(tmp_path, {}, odd="stop")
    assert (again.resumed, again.weights) == (2, whole.weights)


def test_what_another_rank_has_found_out_of_the_step_before_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its gradients went into all weights."""
    Run(tmp_path, {}, steps=2)
    note_of_rank_1(tmp_path, step=3, verdict="own")
    Run(tmp_path, {4: {"loss": NAN}, 5: {"loss": NAN}})
    note_of_rank_1(tmp_path, step=2, verdict="own")
    with pytest.raises(OddStepError):
        Run(tmp_path, {7: {"loss": NAN}}, steps=8)


def test_a_step_that_another_rank_had_made_again_is_not_made_again_by_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where both are odd the one that is later at its boundary may be stopped before it has noted it."""
    Run(tmp_path, {}, steps=2)
    note_of_rank_1(tmp_path, step=3, verdict="open")
    Run(tmp_path, {3: {"loss": NAN}, 4: {"loss": NAN}})
    assert "step 3 has been made again, and is odd on rank 0 (loss nan), too; the training goes on" in caplog.text


def test_the_first_step_has_no_boundary_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is the program's own for the others, and what is saved after it is used."""
    Run(tmp_path, {1: {"loss": NAN}}, steps=3)
    assert "there is no boundary to go back to" in caplog.text
    assert verdicts(tmp_path) == [(1, "own")]
    assert Run(tmp_path, {}).resumed == 3


def test_with_a_scaler_gradients_are_allowed_to_overflow(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    Run(tmp_path, {3: {"grad_norm": INF}}, scaler=scaler)
    with pytest.raises(OddStepError):
        Run(tmp_path / "loss", {3: {"loss": INF}}, scaler=torch.amp.GradScaler("cpu"))


def test_a_program_that_catches_it_does_not_end_as_if_it_were_done(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = mx.Guard(model=model, optimizer=optimizer, directory=tmp_path / "ckpt", odd="back", snapshot_every=1)

    def train() -> None:
        for step in range(1, 5):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            with suppress(ArithmeticError):
                guard.step_end(loss=NAN if step == 2 else 1.0)
        assert guard.step == 1

    with pytest.raises(OddStepError, match="step 2"):
        guard.run(train)


def test_a_damaged_record_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "odd_steps_rank_0.json").write_text("{")
    Run(tmp_path, {})
    assert "odd_steps_rank_0.json is not used" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"snapshot_every": 4}, r"odd='back' .*needs a snapshot of each in shared memory.*snapshot_every=1"),
        ({"snapshot_every": None}, r"--snapshot-every 1"),
        ({"odd": "skip"}, 'give "back", "stop", "ignore"'),
    ],
)
def test_what_could_not_go_back_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Run(tmp_path, {}, **options)


def test_without_shared_memory_or_a_loss_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"guard\.step_end\(loss=loss\)"):
        Run(tmp_path, {1: {"loss": None}})
    monkeypatch.setenv("MINDX_ARENA_DIR", "none")
    with pytest.raises(UsageError, match="needs a snapshot of each"):
        Run(tmp_path / "b", {})


def test_a_loss_that_is_no_number_of_any_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"step_end\(loss=...\) has got a dict.*the sum of several losses"):
        Run(tmp_path, {2: {"loss": {"a": 1.0}}})


def test_a_layer_that_keeps_the_loop_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_ODD", "back")
    net = nn.Linear(2, 2)
    model = mx.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2))
    saved = mx.ExceptionCheckpoint(prefix="a", directory=str(tmp_path / "ckpt"))
    with pytest.raises(UsageError, match="is for a loop of your own"):
        model.train(1, mx.data.ResumableLoader(data, batch_size=2, seed=0), callbacks=[saved])


def test_nothing_is_looked_at_unless_it_is_asked_for(tmp_path: Path) -> None:
    Run(tmp_path, {3: {"loss": NAN}}, odd=None)
    assert not list((tmp_path / "ckpt").glob("odd_*"))
