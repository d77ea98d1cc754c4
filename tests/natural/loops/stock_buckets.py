"""A batch sampler of the program's own: batches of similar length, in a new order each epoch."""

import random
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Buckets(Sampler):
    def __init__(self, lengths, size):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.size = size

    def __len__(self):
        return len(self.order) // self.size

    def __iter__(self):
        batches = [self.order[i * self.size : (i + 1) * self.size] for i in range(len(self))]
        random.shuffle(batches)
        yield from batches


torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Noisy(), batch_sampler=Buckets([i * 7 % 13 for i in range(30)], 6))
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
