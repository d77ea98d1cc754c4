"""A curriculum: the data set gets more samples from the second epoch on."""

import sys
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points


class Staged(Dataset[Any]):
    def __init__(self) -> None:
        self.data, self.size = points(24), 12

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
staged = Staged()
loader = DataLoader(staged, batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(3):
        staged.size = 12 if epoch == 1 else 24
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
