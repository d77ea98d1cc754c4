"""Lightning: ``python train_lightning.py DIRECTORY``. Stop it with SIGTERM, start it again.

Several ranks: ``mindx-elastic run --nproc-per-node 2 train_lightning.py DIRECTORY``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from digits import Digits, digest, network
from mindx_elastic.integrations.lightning import ElasticCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["train_loss_epoch"]
        self.print(f"epoch {self.current_epoch + 1}: loss {loss.item():.4f}", flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


pl.seed_everything(0)
module = Classifier()
trainer = pl.Trainer(
    max_epochs=20, accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[ElasticCallback(sys.argv[1])],  # the one line more
)  # fmt: skip
held_out = DataLoader(Digits(held_out=True), batch_size=64)
trainer.fit(module, DataLoader(Digits(), batch_size=32, shuffle=True), held_out)
print("weights", digest(module))
