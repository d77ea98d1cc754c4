"""The data set counts its calls: what it gives follows from how often it was asked."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)


class Counting(Dataset):
    def __init__(self):
        self.data = points()
        self.calls = 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.calls += 1
        x, y = self.data[index]
        return x * (1 + 0.01 * self.calls), y


model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Counting(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
