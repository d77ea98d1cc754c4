"""A variational autoencoder: noise in the forward, the weight of one term grows with the step."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done

torch.manual_seed(0)
torch.set_num_threads(1)
encode, decode = nn.Linear(8, 8), nn.Linear(4, 8)
opt = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=1e-2)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=[encode, decode], optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, _ in loader:
            mean, log_std = encode(x).chunk(2, 1)
            code = torch.distributions.Normal(mean, log_std.exp()).rsample()
            divergence = (mean**2 + (2 * log_std).exp() - 2 * log_std - 1).sum(1).mean() / 2
            loss = F.mse_loss(decode(code), x) + min(1.0, guard.step / 10) * 0.1 * divergence
            opt.zero_grad()
            loss.backward()
            opt.step()
            guard.step_end(loss=loss)
done(encode, decode)
