"""GradNorm's kind of balance: losses are divided by the first ones, in an object; it is named."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done


class Balance:
    def __init__(self):
        self.first = None

    def __call__(self, losses):
        losses = torch.stack(losses)
        if self.first is None:
            self.first = losses.detach()
        return (torch.softmax(losses.detach() / self.first, 0) * losses).sum()


torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
balance = Balance()
guard = mx.Guard(
    model=model,
    optimizer=opt,
    loader=loader,
    stateful={"balance": balance},
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            out = model(x)
            loss = balance([F.cross_entropy(out[:, :3], y), F.mse_loss(out[:, 3], x.sum(1))])
            opt.zero_grad()
            loss.backward()
            opt.step()
            guard.step_end(loss=loss)
done(model)
