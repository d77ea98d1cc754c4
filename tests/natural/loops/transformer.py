"""A small language model: tied weights, label smoothing, warm-up, clipping, gradient checkpointing."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx
from tests.natural.tools import done, text


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2))
        self.out = nn.Linear(16, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.embed(x)
        for layer in self.layers:
            h = torch.utils.checkpoint.checkpoint(layer, h, mask, use_reentrant=False)
        return self.out(h)


torch.manual_seed(0)
torch.set_num_threads(1)
data = text()
model = Language()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=20)
windows = TensorDataset(torch.stack([data[i : i + 9] for i in range(0, 240, 8)]))
loader = DataLoader(windows, batch_size=4, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    lr_scheduler=sched,
    loader=loader,
    directory=sys.argv[1],
)

with guard:
    for _epoch in guard.epochs(2):
        for (chunk,) in loader:
            out = model(chunk[:, :-1])
            opt.zero_grad()
            F.cross_entropy(out.flatten(0, 1), chunk[:, 1:].flatten(), label_smoothing=0.1).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            guard.step_end()
done(model)
