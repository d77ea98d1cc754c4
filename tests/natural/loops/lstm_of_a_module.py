"""A recurrent module that keeps its hidden state in a plain attribute, which no state_dict has."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, points


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.state = nn.LSTMCell(8, 8), nn.Linear(8, 3), None

    def forward(self, x):
        if self.state is None or len(self.state[0]) != len(x):
            self.state = x.new_zeros(len(x), 8), x.new_zeros(len(x), 8)
        h, c = self.cell(x, self.state)
        self.state = h.detach(), c.detach()
        return self.out(h)


torch.manual_seed(0)
torch.set_num_threads(1)
model = Recurrent()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(points(), batch_size=6)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            guard.step_end(loss=loss)
done(model)
