"""Data parallel with `no_sync` for all but the last batch of an update."""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

network = mlp()
model = DistributedDataParallel(network)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=2, shuffle=True, drop_last=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])

with guard:
    for _epoch in guard.epochs(3):
        for i, (x, y) in guard.enumerate(loader, start=1):
            if i % 2 or i == len(loader):
                with model.no_sync():
                    (F.cross_entropy(model(x), y) / 2).backward()
            else:
                (F.cross_entropy(model(x), y) / 2).backward()
                opt.step()
                opt.zero_grad()
            guard.step_end()
        opt.zero_grad()
done(network)

dist.destroy_process_group()
