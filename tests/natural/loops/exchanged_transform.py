"""An object of the data set is exchanged in one epoch: a resumed run does not come by that line again."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Doubled:
    def __call__(self, x):
        return x * 2


class Pictures(Dataset):
    def __init__(self):
        self.base, self.transform = Noisy(), None

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        x, y = self.base[index]
        return (x if self.transform is None else self.transform(x)), y


torch.manual_seed(0)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = Pictures()
loader = DataLoader(data, batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(3):
        if epoch == 1:
            data.transform = Doubled()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
