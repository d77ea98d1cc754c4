#!/usr/bin/env bash
# Finding: parameterfree's KT takes what load_state_dict has given it away in the next step.
# parameterfree 0.0.1, torch 2.13.0, CPU. The state_dict has the start point x0 and the sum of gradients theta, and load_state_dict takes both. But the
# wealth, the count of steps and whether a step was made are plain attributes: a new optimizer takes its next step for the first one, puts the present
# weights in the place of x0 and zeros in the place of theta, and bets from the initial wealth. The weights after 5 + 5 steps are not those after
# 10. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet --no-deps parameterfree==0.0.1
cat > show.py <<'PYTHON'
import copy, sys
from importlib.metadata import version
import torch
from parameterfree import KT

x = torch.linspace(-1, 1, 32).reshape(16, 2)
y = x.sum(1, keepdim=True)


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, KT(model.parameters(), w=1.0)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


whole, first, second = parts(), parts(), parts()
train(*whole, 10)
train(*first, 5)
for old, new in zip(first, second):
    new.load_state_dict(copy.deepcopy(old.state_dict()))
group = second[1].param_groups[0]
theta = [tensor.norm().item() for tensor in group["theta"]]
train(*second, 1)
print("parameterfree", version("parameterfree"), "torch", torch.__version__)
print("theta after the load:", theta, "equal to the saved one:", theta == [t.norm().item() for t in first[1].param_groups[0]["theta"]])
print("x0 after the next step is the loaded weight:", torch.equal(group["x0"][0], first[0].weight))
train(*second, 4)
print("weight after 10 steps:", whole[0].weight.tolist())
print("after 5, a load and 5:", second[0].weight.tolist())
sys.exit(torch.equal(whole[0].weight, second[0].weight) or not torch.equal(group["x0"][0], first[0].weight))
PYTHON
venv/bin/python show.py
