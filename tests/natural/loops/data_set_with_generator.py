"""The data set augments with a numpy generator of its own."""

import sys

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

torch.manual_seed(0)
np.random.seed(0)
torch.set_num_threads(1)


class Jittered(Dataset):
    def __init__(self):
        self.data = points()
        self.rng = np.random.default_rng(11)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + torch.from_numpy(self.rng.normal(0, 0.1, 8)).float(), y


model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Jittered(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
