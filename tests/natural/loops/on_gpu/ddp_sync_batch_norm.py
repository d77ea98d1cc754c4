"""DDP over NCCL with SyncBatchNorm, accumulation under no_sync() and a gradient scaler."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu, mlp

device = gpu()
dist.init_process_group("nccl", device_id=device)
network = nn.SyncBatchNorm.convert_sync_batchnorm(mlp()).to(device)
model = DistributedDataParallel(network, device_ids=[0])
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=4)
loader = mx.data.ResumableLoader(Noisy(36), batch_size=3, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, scaler=scaler, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for number, (x, y) in enumerate(loader):
            is_last = number % 2 == 1
            with contextlib.nullcontext() if is_last else model.no_sync(), torch.autocast("cuda", torch.float16):
                scaler.scale(F.cross_entropy(model(x.to(device)), y.to(device))).backward()
            if is_last:
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            guard.step_end()
done(network)

dist.destroy_process_group()
