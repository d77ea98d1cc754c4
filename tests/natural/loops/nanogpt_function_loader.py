"""The same, drawn ahead through a loader that knows which batches were used."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, text

torch.manual_seed(0)
torch.set_num_threads(1)
data = text()
model = nn.Sequential(nn.Embedding(11, 16), nn.Dropout(0.1), nn.Linear(16, 11))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)


def get_batch():
    at = torch.randint(len(data) - 9, (4,))
    return torch.stack([data[i : i + 8] for i in at]), torch.stack([data[i + 1 : i + 9] for i in at])


loader = mx.data.from_function(get_batch)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    batches = iter(loader)
    x, y = next(batches)
    for _step in guard.steps(12):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        x, y = next(batches)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        guard.step_end(loss=loss)
done(model)
