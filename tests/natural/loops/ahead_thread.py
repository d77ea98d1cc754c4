"""A thread fills a queue: how far it is ahead differs from step to step."""

import queue
import sys
import threading

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


def in_background(loader, depth=2):
    batches = queue.Queue(depth)

    def fill():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := batches.get()) is not None:
        yield batch


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Noisy(), batch_size=3, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in in_background(loader):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
