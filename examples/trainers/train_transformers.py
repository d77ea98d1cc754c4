"""Transformers' trainer: ``python train_transformers.py DIRECTORY``. Stop it with SIGTERM, start it again.

Several ranks: ``mindx-elastic run --nproc-per-node 2 train_transformers.py DIRECTORY``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TrainingArguments, set_seed

from digits import Digits, digest, network
from mindx_elastic.integrations.transformers import ElasticTrainer as Trainer  # instead of: from transformers


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, images: Any, labels: Any = None) -> Any:
        logits = self.net(images)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


set_seed(0)
model = Classifier()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        sys.argv[1], num_train_epochs=20, per_device_train_batch_size=32, learning_rate=3e-3, logging_steps=50,
        eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    ),
    train_dataset=Digits(as_dict=True),
    eval_dataset=Digits(held_out=True, as_dict=True),
)  # fmt: skip
trainer.train()
print("weights", digest(model))
