"""A recurrent network whose hidden state goes on from batch to batch; it is named."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, text


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(11, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 11)

    def forward(self, x, hidden):
        seen, hidden = self.gru(self.embed(x), hidden)
        return self.out(seen), hidden


class Memory:
    def __init__(self):
        self.hidden = torch.zeros(1, 1, 16)

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, state):
        self.hidden = state["hidden"]


torch.manual_seed(0)
torch.set_num_threads(1)
data = text()
model = Characters()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
memory = Memory()
guard = mx.Guard(model=model, optimizer=opt, stateful={"memory": memory}, directory=sys.argv[1])
with guard:
    for step in guard.steps(15):
        at = (step - 1) * 8 % 320
        x, y = data[at : at + 8][None], data[at + 1 : at + 9][None]
        out, memory.hidden = model(x, memory.hidden)
        opt.zero_grad()
        F.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
        memory.hidden = memory.hidden.detach()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        opt.step()
        guard.step_end()
done(model)
