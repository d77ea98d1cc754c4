"""Head first, then everything: two loops over epochs in one block, with the same loader."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done

torch.manual_seed(0)
torch.set_num_threads(1)
backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
head = nn.Linear(16, 3)
model = nn.Sequential(backbone, nn.Dropout(0.1), head)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])


def train(epochs):
    for _epoch in epochs:
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()


with guard:
    backbone.requires_grad_(False)
    train(guard.epochs(2))
    backbone.requires_grad_(True)
    train(guard.epochs(4))
done(model)
