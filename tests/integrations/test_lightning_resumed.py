"""Fits of Lightning's as programs write them, cut off by an exception and started again in the same process."""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger

from mindx_elastic.integrations.lightning import ElasticCallback

# Lightning calls things of torch's that will go away.
pytestmark = pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning", "default::UserWarning")

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))


class Fault(Exception):
    pass


class Module(pl.LightningModule):
    """Fails in the forward of training step `fails_at`, or in the validation behind epoch `fails_behind`."""

    def __init__(self, fails_at: int | None = None, fails_behind: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.fails_at, self.fails_behind = fails_at, fails_behind
        self.rates: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def training_step(self, batch: Any, index: int) -> Any:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.fails_at:
            raise Fault
        return self.layer(batch[0]).square().mean() + self.layer(batch[0] + torch.rand(1)).mean()

    def validation_step(self, batch: Any, index: int) -> None:
        if not self.trainer.sanity_checking and self.current_epoch + 1 == self.fails_behind:
            raise Fault
        # The first epoch is the best one.
        self.log("val_loss", torch.tensor(float(self.current_epoch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(
    directory: Path, module: pl.LightningModule, *callbacks: Any, is_elastic_last: bool = False, **settings: Any
) -> pl.Trainer:
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, **settings}
    elastic = ElasticCallback(directory / "elastic")
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, elastic] if is_elastic_last else [elastic, *callbacks], **settings,
    )  # fmt: skip
    torch.manual_seed(3)
    data = TensorDataset(X)
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
    return trainer


class OneCycle(Module):
    """Asks for the number of steps before the fit starts, as Lightning's pages show it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        self.total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=self.total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_a_schedule_may_ask_for_the_number_of_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    straight = OneCycle()
    trainer = fit(tmp_path / "straight", straight)
    assert (straight.total, trainer.global_step) == (12, 12)
    torch.manual_seed(0)
    with pytest.raises(Fault):
        fit(tmp_path / "failed", OneCycle(fails_at=6))
    resumed = OneCycle()
    fit(tmp_path / "failed", resumed)
    assert all(torch.equal(one, other) for one, other in zip(straight.parameters(), resumed.parameters(), strict=True))


class Gathers(Module):
    """As in Lightning's guide to its version 2: lists and sums that are emptied at an epoch's end, or before its
    begin."""

    def __init__(self, **fails: int) -> None:
        super().__init__(**fails)
        self.sizes = [3, 2]
        self.outputs: list[Any] = []
        self.by_name: dict[str, list[Any]] = {"step": []}
        self.last: deque[float] = deque(maxlen=3)
        self.total, self.calls, self.batches = 0.0, 0, 0
        self.ends: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.by_name["step"] = []
        self.count = 0
        self.squares = torch.zeros(())

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.outputs.append(loss.detach())
        self.by_name["step"].append({"loss": loss.item(), "index": index})
        self.last.append(loss.item())
        self.total += loss.item()
        self.squares += loss.detach() ** 2
        self.count += 1
        self.calls += 1
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def on_train_epoch_end(self) -> None:
        lists = torch.stack(self.outputs).mean().item(), list(self.by_name["step"]), list(self.last)
        self.ends.append((*lists, self.total / self.count, self.squares.item(), self.batches))
        self.outputs.clear()
        self.total, self.batches = 0.0, 0


@pytest.mark.parametrize("fails", [{"fails_at": 7}, {"fails_at": 6}, {"fails_at": 5}, {"fails_behind": 2}], ids=str)
def test_what_the_steps_gather_and_sum_up_goes_on(tmp_path: Path, fails: dict[str, int]) -> None:
    torch.manual_seed(0)
    straight = Gathers()
    fit(tmp_path / "straight", straight)
    torch.manual_seed(0)
    with pytest.raises(Fault):
        fit(tmp_path / "failed", Gathers(**fails))
    resumed = Gathers()
    resumed.sizes = [4, 2]
    fit(tmp_path / "failed", resumed)
    assert resumed.ends == straight.ends and resumed.calls == straight.calls
    assert resumed.sizes == [4, 2]  # what no step has changed is the program's


class Switched(Module):
    """Sets once for all that follows; and a hidden state that each step replaces."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(fails_at=fails_at)
        self.is_noisy, self.scale = False, 1.0
        self.hidden: torch.Tensor = torch.zeros(1)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index) * self.scale + 0.01 * self.hidden.sum()
        self.hidden = 0.5 * self.hidden + loss.detach()
        return loss * torch.rand(1).sum() if self.is_noisy else loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.is_noisy = True


class Scales(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.scale = 0.5


def test_what_hooks_and_steps_set_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    straight = Switched()
    fit(tmp_path / "straight", straight, Scales())
    torch.manual_seed(0)
    with pytest.raises(Fault):
        fit(tmp_path / "failed", Switched(fails_at=10), Scales())
    resumed = Switched()
    fit(tmp_path / "failed", resumed, Scales())
    assert (resumed.is_noisy, resumed.scale) == (True, 0.5)
    assert resumed.hidden.item() == straight.hidden.item()
    assert all(torch.equal(one, other) for one, other in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_list_that_is_too_long_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class GathersTooMuch(Module):
        def __init__(self) -> None:
            super().__init__()
            self.images: list[torch.Tensor] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.images.append(torch.zeros(1 << 23))

    fit(tmp_path, GathersTooMuch(), max_epochs=1)
    assert caplog.text.count("GathersTooMuch.images gathers more than 16 MiB") == 1


def test_the_best_scores_go_on_in_a_folder_that_is_numbered_anew(tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {"logger": CSVLogger(tmp_path / "logs"), "enable_checkpointing": True}

    with pytest.raises(Fault):
        fit(tmp_path, Module(fails_at=6), ModelCheckpoint(monitor="val_loss"), **settings())
    saved = ModelCheckpoint(monitor="val_loss")
    fit(tmp_path, Module(), saved, **settings())
    assert saved.best_model_score == 0 and "epoch=0" in saved.best_model_path
    assert "version_1" in str(saved.dirpath) and "version_0" in saved.best_model_path


def test_a_save_by_steps_is_not_done_again_in_a_window_of_accumulation(tmp_path: Path) -> None:
    def fit_in(name: str, module: Module) -> list[str]:
        saved = ModelCheckpoint(tmp_path / name / "by_steps", every_n_train_steps=1, save_top_k=-1)
        fit(tmp_path / name, module, saved, accumulate_grad_batches=2, enable_checkpointing=True)
        return sorted(each.name for each in (tmp_path / name / "by_steps").iterdir())

    straight = fit_in("straight", Module())
    with pytest.raises(Fault):
        fit_in("failed", Module(fails_at=5))  # in front of a window of another epoch, behind the save of the one before
    assert fit_in("failed", Module()) == straight


class Average(pl.Callback):
    """An average of the weights in a dict, with a state; a validation uses it."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.shadow = self.shadow or {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.shadow[name].copy_(0.9 * self.shadow[name] + 0.1 * value)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.own = {name: value.clone() for name, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.shadow)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.own)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_an_average_that_is_exchanged_for_a_validation_is_no_cause_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    average = Average()
    fit(tmp_path, Module(), average)
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == []


def test_an_exception_in_a_validation_with_averaged_weights_saves_none_of_these(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on the ranks that are left when one is killed there: what they have in common fails."""
    with pytest.raises(Fault):
        fit(tmp_path, Module(fails_behind=2), EMAWeightAveraging(decay=0.5))
    assert "the boundary after step 8 cannot be saved: the weights are exchanged" in caplog.text
    assert not list((tmp_path / "elastic").glob("*_breakpoint.safetensors"))


class Ends(Module):
    """Fails behind the last step of the second epoch."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.ends = fails, 0

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.fails and self.current_epoch == 1:
            raise Fault
        self.ends += 1


def stopped_early(directory: Path, module: Module, how: str) -> tuple[Any, ...]:
    early = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
    settings: dict[str, Any] = {"max_steps": 8 if how == "steps" else 6} if how else {}
    trainer = fit(directory, module, *([] if how else [early]), **settings)
    values = [value.tolist() for value in module.state_dict().values()]
    return trainer.callback_metrics, trainer.global_step, trainer.current_epoch, values, torch.rand(1)


HOW = pytest.mark.parametrize("how", ["", "steps", "steps in mid-epoch"], ids=["early", "steps", "mid-epoch"])


@HOW
def test_a_fit_that_was_over_before_its_epochs_and_is_started_again_has_its_metrics(tmp_path: Path, how: str) -> None:
    first = stopped_early(tmp_path, Ends(), how)
    assert stopped_early(tmp_path, Ends(), how) == first
    assert "train_loss_epoch" in first[0]


@HOW
def test_the_end_of_an_epoch_that_has_ended_the_fit_is_done_again(tmp_path: Path, how: str) -> None:
    torch.manual_seed(0)
    straight = stopped_early(tmp_path / "straight", Ends(), how)
    torch.manual_seed(0)
    with pytest.raises(Fault):
        stopped_early(tmp_path / "failed", Ends(fails=True), how)
    resumed = Ends()
    assert stopped_early(tmp_path / "failed", resumed, how) == straight
    assert resumed.ends == 2, "the first epoch's, in the other process, and this one"


@pytest.mark.parametrize("fails_at", [7, 11, 18])
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "behind"])
def test_stochastic_weight_averaging_goes_on_in_all_of_its_epochs(
    tmp_path: Path, fails_at: int, is_first: bool
) -> None:
    """In the first epoch that it averages in, a later one, and the one in which it makes statistics of BatchNorm."""

    def fit_in(name: str, module: Module) -> tuple[Any, ...]:
        average = StochasticWeightAveraging(swa_lrs=0.3, swa_epoch_start=2, annealing_epochs=3)
        trainer = fit(tmp_path / name, module, average, max_epochs=4, is_elastic_last=is_first)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        averages = average.state_dict()["average_model_state"]
        values = [value.tolist() for state in (module.state_dict(), averages) for value in state.values()]
        return rate, values, module.rates

    torch.manual_seed(0)
    straight = fit_in("straight", Module())
    torch.manual_seed(0)
    with pytest.raises(Fault):
        fit_in("failed", Module(fails_at=fails_at))
    assert fit_in("failed", Module()) == straight


def test_a_second_resume_names_nothing_of_lightnings_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What Lightning notes of its own resume differs then, and is no variable of the program."""

    class Stopped(Module):
        def __init__(self, at: int | None) -> None:
            super().__init__()
            self.at = at

        def training_step(self, batch: Any, index: int) -> Any:
            if self.trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, index)

    caplog.set_level(logging.INFO)
    for at in (2, 6):
        with pytest.raises(SystemExit):
            fit(tmp_path, Stopped(at))
    caplog.clear()
    fit(tmp_path, Stopped(None))
    assert "not got back: model.at (6, now None);" in caplog.text, caplog.text
