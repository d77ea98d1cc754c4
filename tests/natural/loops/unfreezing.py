"""Fine-tuning: the backbone is unfrozen in the second epoch, as a group of its own with a smaller step."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done

torch.manual_seed(0)
torch.set_num_threads(1)
backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
head = nn.Linear(16, 3)
model = nn.Sequential(backbone, nn.Dropout(0.1), head)
backbone.requires_grad_(False)
opt = torch.optim.AdamW(head.parameters(), lr=1e-2)
loader = DataLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])

with guard:
    for epoch in guard.epochs(3):
        if epoch >= 2 and len(opt.param_groups) == 1:
            backbone.requires_grad_(True)
            opt.add_param_group({"params": backbone.parameters(), "lr": 1e-3})
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
