"""What a fit of Lightning's with the callback refuses or warns of, at its begin or at its first steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mindx_elastic.errors import UnmanagedStateError, UsageError

pytest.importorskip("lightning")

import lightning.pytorch as pl

from mindx_elastic.integrations.lightning import ElasticCallback

# Lightning calls things of torch's that will go away.
pytestmark = pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning", "default::UserWarning")


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class SavesItself(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1


class Average(pl.Callback):
    """An average of the weights that no state_dict has."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(pl_module.layer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average.update_parameters(pl_module.layer)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4)


def fit(
    directory: Path,
    settings: dict[str, Any] | None = None,
    *,
    callbacks: Any = (),
    module: type[Module] = Module,
    loader: Any = None,
    **options: Any,
) -> None:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ElasticCallback(directory, **options),
        *callbacks], **(settings or {}),
    )  # fmt: skip
    trainer.fit(module(), data() if loader is None else loader)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"settings": {"reload_dataloaders_every_n_epochs": 1}}, "reload_dataloaders_every_n_epochs"),
        ({"settings": {"overfit_batches": 2}}, "overfit_batches"),
        ({"loader": {"a": data(), "b": data()}}, "keeps one DataLoader"),
        ({"module": SavesItself}, "SavesItself.on_save_checkpoint"),
        ({"callbacks": [pl.callbacks.ModelPruning("l1_unstructured", amount=0.2)]}, "ModelPruning"),
        ({"callbacks": [pl.callbacks.LearningRateFinder()]}, "LearningRateFinder"),
        ({"stateful": {"loops": {}}}, "that name is the integration's own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, what: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        fit(tmp_path, **what)


def test_an_average_in_a_callback_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnmanagedStateError, match=r"Average\.average.*state_dict\(\) and load_state_dict\(\) in Average"
    ):
        fit(tmp_path, callbacks=[Average()])


def test_objects_of_the_program_can_be_named(tmp_path: Path) -> None:
    box = {"n": 1}
    fit(tmp_path, stateful={"box": box})
    box["n"] = 2
    fit(tmp_path, stateful={"box": box})  # a finished fit: its state comes back
    assert box == {"n": 1}
