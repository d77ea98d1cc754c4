"""Data parallel, with a resumable loader. `verdicts` has what people change in it."""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx
from tests.natural import tools

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
network = tools.mlp()
model = DistributedDataParallel(network)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(tools.Noisy(), batch_size=3, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
tools.done(network)
dist.destroy_process_group()
