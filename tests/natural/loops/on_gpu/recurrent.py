"""An LSTM of cuDNN over a long text in pieces: its state goes on from piece to piece, and is named."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, gpu, text

device = gpu()
symbols = text(400).to(device).view(4, 100)
embed, lstm, out = nn.Embedding(11, 16), nn.LSTM(16, 16, num_layers=2, batch_first=True), nn.Linear(16, 11)
model = nn.ModuleList([embed, lstm, out]).to(device)
opt = torch.optim.Adam(model.parameters(), lr=0.01)
h, c = torch.zeros(2, 4, 16, device=device), torch.zeros(2, 4, 16, device=device)
guard = mx.Guard(model=model, optimizer=opt, stateful={"h": h, "c": c}, directory=sys.argv[1])
with guard:
    for step in guard.steps(18):
        at = step % 9 * 10
        x, y = symbols[:, at : at + 10], symbols[:, at + 1 : at + 11]
        hidden, (h1, c1) = lstm(embed(x), (h.clone(), c.clone()))
        loss = F.cross_entropy(out(F.dropout(hidden, 0.1)).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        h.copy_(h1.detach())
        c.copy_(c1.detach())
        guard.step_end(loss=loss)
done(model, h, c)
