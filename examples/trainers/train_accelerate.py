"""Accelerate: ``python train_accelerate.py DIRECTORY``. Stop it with SIGTERM, start it again.

Several ranks: ``mindx-elastic run --nproc-per-node 2 train_accelerate.py DIRECTORY``.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from digits import Digits, digest, network
from mindx_elastic.integrations import accelerate as elastic

set_seed(0)
accelerator = Accelerator(cpu=True)
plain = network()
optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
loader = DataLoader(Digits(), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
with elastic.guard(accelerator, directory=sys.argv[1]) as guard:
    for epoch in guard.epochs(20):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            guard.step_end()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
accelerator.print("weights", digest(accelerator.unwrap_model(model)))
