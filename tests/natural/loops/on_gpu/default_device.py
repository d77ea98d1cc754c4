"""Everything on the device by default: weights, data, the loader's shuffling."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx
from tests.natural.tools import done, gpu, mlp

device = gpu()
torch.set_default_device(device)
model = mlp()
x = torch.randn(30, 8)
data = TensorDataset(x, x[:, :3].argmax(1))
opt = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator(device))
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
