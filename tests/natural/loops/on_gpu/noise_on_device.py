"""Noise from a generator on the device, a layer whose activations are computed again in backward, accumulation."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu, mlp

device = gpu()
noise = torch.Generator(device).manual_seed(3)
body, head = mlp(out=16, dropout=0.3).to(device), nn.Linear(16, 3).to(device)
model = nn.ModuleList([body, head])
opt = torch.optim.RMSprop(model.parameters(), lr=0.003)
loader = DataLoader(Noisy(), batch_size=3, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    loader=loader,
    stateful={"noise": noise},
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for number, (x, y) in enumerate(loader):
            noisy = x.to(device) + 0.1 * torch.randn(x.shape, generator=noise, device=device)
            F.cross_entropy(head(checkpoint(body, noisy, use_reentrant=False)), y.to(device)).backward()
            if number % 2 == 1:
                opt.step()
                opt.zero_grad()
            guard.step_end()
done(model)
