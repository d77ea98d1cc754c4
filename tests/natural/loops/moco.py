"""Contrastive learning: two views, a momentum encoder, a queue of keys in buffers."""

import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import done, points

torch.manual_seed(0)
torch.set_num_threads(1)


class Moco(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(12, 4)))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, one, other):
        q = F.normalize(self.q(one))
        with torch.no_grad():
            for k, p in zip(self.k.parameters(), self.q.parameters(), strict=True):
                k.lerp_(p, 0.1)
            key = F.normalize(self.k(other))
        logits = torch.cat([(q * key).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        self.queue[int(self.at) : int(self.at) + len(key)] = key
        self.at.copy_((self.at + len(key)) % 12)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


model = Moco()
opt = torch.optim.SGD(model.q.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(points(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])

with guard:
    for _epoch in guard.epochs(3):
        for x, _ in loader:
            opt.zero_grad()
            model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)).backward()
            opt.step()
            guard.step_end()
done(model)
