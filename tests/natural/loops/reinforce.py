"""Policy gradient over whole episodes; no loader, the world starts over each time."""

import sys

import numpy as np
import torch
from torch import nn

import mindx_elastic as mx
from tests.natural.tools import done
from tests.natural.walk import Walk


class Baseline:
    mean = 0.0

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


torch.manual_seed(0)
np.random.seed(0)
torch.set_num_threads(1)
world = Walk()
policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
baseline = Baseline()
guard = mx.Guard(model=policy, optimizer=opt, stateful={"world": world, "baseline": baseline}, directory=sys.argv[1])
with guard:
    for _episode in guard.steps(8):
        seen, over, terms, total = world.reset(), False, [], 0.0
        while not over:
            choice = torch.distributions.Categorical(logits=policy(seen))
            action = choice.sample()
            terms.append(choice.log_prob(action))
            seen, reward, over = world.step(int(action))
            total += reward
        opt.zero_grad()
        (-(total - baseline.mean) * torch.stack(terms).sum()).backward()
        opt.step()
        baseline.mean += 0.1 * (total - baseline.mean)
        guard.step_end(total=total)
done(policy, baseline.mean)
