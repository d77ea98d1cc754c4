"""Policy gradient over whole episodes; no loader, the world begins anew each time."""

import sys

import numpy as np
import torch
from torch import nn

import mindx_elastic as mx
from tests.natural.tools import done


class Walk:
    """A small world: walk to +3 on a line; the wind is drawn from a generator of its own."""

    def __init__(self):
        self.wind = np.random.default_rng(2)
        self.reset()

    def reset(self):
        self.at, self.time = 0.0, 0
        return self.look()

    def look(self):
        return torch.tensor([self.at, self.time / 10])

    def step(self, action):
        self.at += (1 if action else -1) + self.wind.normal(0, 0.3)
        self.time += 1
        return self.look(), -abs(3 - self.at), self.time >= 10

    def state_dict(self):
        return {"at": self.at, "time": self.time, "wind": self.wind.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.time = state["at"], state["time"]
        self.wind.bit_generator.state = state["wind"]


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
