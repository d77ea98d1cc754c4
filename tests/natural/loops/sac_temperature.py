"""A temperature that is learned: a bare parameter with an optimizer of its own, named in `stateful`."""

import sys

import torch
from torch import nn

import mindx_elastic as mx
from tests.natural.tools import Noisy, done

torch.manual_seed(0)
torch.set_num_threads(1)
actor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
log_alpha = torch.zeros(1, requires_grad=True)
opt = torch.optim.Adam(actor.parameters(), lr=1e-2)
opt_alpha = torch.optim.Adam([log_alpha], lr=1e-2)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(
    model=actor,
    optimizer=[opt, opt_alpha],
    loader=loader,
    stateful={"log_alpha": log_alpha},
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            choice = torch.distributions.Categorical(logits=actor(x))
            action = choice.sample()
            entropy = choice.entropy().mean()
            opt.zero_grad()
            reward = (action == y).float()
            loss = -(choice.log_prob(action) * (reward - 0.3)).mean() - log_alpha.exp().detach() * entropy
            loss.backward()
            opt.step()
            opt_alpha.zero_grad()
            (log_alpha.exp() * (entropy.detach() - 0.5)).sum().backward()
            opt_alpha.step()
            guard.step_end()
done(actor, log_alpha)
