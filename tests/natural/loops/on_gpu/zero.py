"""DDP over NCCL, each rank with a share of the optimizer's state (ZeroRedundancyOptimizer)."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu, mlp

device = gpu()
dist.init_process_group("nccl", device_id=device)
network = mlp().to(device)
model = DistributedDataParallel(network, device_ids=[0])
opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
loader = mx.data.ResumableLoader(Noisy(36), batch_size=3, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            opt.step()
            guard.step_end()
done(network)

dist.destroy_process_group()
