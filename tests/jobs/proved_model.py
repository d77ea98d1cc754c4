"""Trains with `Model` and its callbacks, for a proof."""

from __future__ import annotations

import sys

import torch
from torch import nn

from mindx_elastic import CheckpointConfig, ExceptionCheckpoint, Model, ModelCheckpoint
from mindx_elastic.data import ResumableLoader

torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
network = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 3))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
model = Model(network, nn.CrossEntropyLoss(), optimizer, metrics={"accuracy"}, lr_scheduler=scheduler)
callbacks = [
    ExceptionCheckpoint(prefix="net", directory=sys.argv[2]),
    ModelCheckpoint(prefix="net", directory=sys.argv[2], config=CheckpointConfig(save_checkpoint_steps=4)),
]
model.train(2, ResumableLoader(data, batch_size=8, shuffle=True, seed=1), callbacks=callbacks)
print(model.eval(ResumableLoader(data, batch_size=8)))
