"""A prefetcher class as NVIDIA's examples have it."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Prefetcher:
    def __init__(self, loader):
        self.batches = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.batch = next(self.batches)
        except StopIteration:
            self.batch = None

    def next(self):
        batch = self.batch
        if batch is not None:
            self.preload()
        return batch


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=1)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        prefetcher = Prefetcher(loader)
        batch = prefetcher.next()
        while batch is not None:
            x, y = batch
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
            batch = prefetcher.next()
done(model)
