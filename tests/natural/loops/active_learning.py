"""Active learning: the pool that is trained on grows after each epoch, by what the model says."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
data = points(40)
labelled = list(range(10))
loader = DataLoader(Subset(data, labelled), batch_size=5, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    loader=loader,
    stateful={"labelled": labelled},
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
        model.eval()
        with torch.no_grad():
            unsure = model(data.tensors[0]).softmax(1).amax(1)
        unsure[labelled] = 1
        labelled.extend(unsure.argsort()[:5].tolist())
done(model)
