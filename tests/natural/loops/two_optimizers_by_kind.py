"""Sparse gradients of an embedding with SparseAdam, the rest with Adam."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx
from tests.natural.tools import done, text

torch.manual_seed(0)
torch.set_num_threads(1)
embed, out = nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11)
data = text()
opts = [torch.optim.SparseAdam(embed.parameters(), lr=1e-2), torch.optim.Adam(out.parameters(), lr=1e-2)]
loader = DataLoader(TensorDataset(data[:60], data[1:61]), batch_size=12, shuffle=True)
guard = mx.Guard(model=[embed, out], optimizer=opts, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            for opt in opts:
                opt.zero_grad()
            F.cross_entropy(out(embed(x)), y).backward()
            for opt in opts:
                opt.step()
            guard.step_end()
done(embed, out)
