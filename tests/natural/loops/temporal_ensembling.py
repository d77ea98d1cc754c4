"""Averaged predictions in a plain tensor, changed in place in a function; it is named."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

data = points()
ensemble = torch.zeros(len(data), 3)


class Indexed(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        return *data[index], index


def step(x, y, index, ramp):
    out = model(x)
    shares = F.softmax(out, dim=1)
    ensemble[index] = 0.6 * ensemble[index] + 0.4 * shares.detach()
    loss = F.cross_entropy(out, y) + ramp * F.mse_loss(shares, ensemble[index])
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(Indexed(), batch_size=6, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    loader=loader,
    stateful={"ensemble": ensemble},
    directory=sys.argv[1],
)
with guard:
    for epoch in guard.epochs(3):
        for x, y, index in loader:
            loss = step(x, y, index, 0.3 * epoch)
            guard.step_end(loss=loss)
done(model, ensemble)
