"""torch.compile with CUDA graphs, which it captures and replays by itself; dropout and BatchNorm inside."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu, mlp

device = gpu()
network = mlp().to(device)
model = torch.compile(network, mode="reduce-overhead")
opt = torch.optim.AdamW(network.parameters(), lr=0.01)
loader = DataLoader(Noisy(), batch_size=6, shuffle=True, drop_last=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(4):
        for x, y in loader:
            torch.compiler.cudagraph_mark_step_begin()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            guard.step_end(loss=loss)
done(network)
