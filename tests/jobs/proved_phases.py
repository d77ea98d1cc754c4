"""Two guards, one after the other, for a proof.

python -m tests.jobs.proved_phases DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import mindx_elastic as mx

torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
for phase in ("one", "two"):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = mx.data.ResumableLoader(data, batch_size=4, shuffle=True)
    directory = Path(sys.argv[1]) / phase
    with mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=directory, prefix=phase) as guard:
        for _ in guard.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
                guard.step_end(loss=loss.item())
