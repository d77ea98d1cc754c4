"""A data set with a generator of its own. `verdicts` has others that follow from more than their index."""

import sys

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)


class Own(Dataset):
    def __init__(self):
        self.data, self.size, self.changed = points(), 30, None
        self.draw, self.calls = np.random.default_rng(11), 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + torch.from_numpy(self.draw.normal(0, 0.1, 8)).float(), y


model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = Own()
loader = DataLoader(data, batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
