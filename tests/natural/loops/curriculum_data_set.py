"""A larger part of the data each epoch: the data set changes with the epoch, the loader stays."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)


class Growing(Dataset):
    def __init__(self):
        self.data = Noisy(36)
        self.part = 12

    def __len__(self):
        return 36

    def __getitem__(self, index):
        return self.data[index % self.part]


model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = Growing()
loader = DataLoader(data, batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])

with guard:
    for epoch in guard.epochs(3):
        data.part = 12 * epoch
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
