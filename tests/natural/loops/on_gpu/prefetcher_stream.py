"""A prefetcher that copies and normalizes the next batch on a stream of its own, as NVIDIA's examples have it."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu, mlp

device = gpu()


class Prefetcher:
    def __init__(self, loader):
        self.batches = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.full((8,), 0.1, device=device)
        self.preload()

    def preload(self):
        try:
            x, y = next(self.batches)
        except StopIteration:
            self.batch = None
            return
        with torch.cuda.stream(self.stream):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            self.batch = x.sub_(self.mean), y

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.batch
        if batch is not None:
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream())
            self.preload()
        return batch


model = mlp().to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=2, pin_memory=True)
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
