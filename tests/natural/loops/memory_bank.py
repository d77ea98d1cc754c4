"""Instance discrimination: a bank of features that the loss reads and each step renews; it is named."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, points


class Bank:
    def __init__(self, size, width):
        self.rows = F.normalize(torch.randn(size, width), dim=1)

    @torch.no_grad()
    def update(self, index, features):
        self.rows[index] = F.normalize(0.5 * self.rows[index] + 0.5 * features, dim=1)


class Indexed(torch.utils.data.Dataset):
    data = points()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index][0], index


torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)
bank = Bank(30, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.3)
loader = torch.utils.data.DataLoader(Indexed(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, stateful={"bank": bank}, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, index in loader:
            features = F.normalize(model(x), dim=1)
            loss = F.cross_entropy(features @ bank.rows.T / 0.1, index)
            opt.zero_grad()
            loss.backward()
            opt.step()
            bank.update(index, features)
            guard.step_end(loss=loss)
done(model, bank.rows)
