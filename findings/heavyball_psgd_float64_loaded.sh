#!/usr/bin/env bash
# Finding: state that heavyball's PSGD optimizers keep in float64 is float32 after load_state_dict, and the resumed training has other weights.
# heavyball 3.2.1, torch 2.13.0, CPU. torch's Optimizer.load_state_dict casts floating state to the parameter's type; the running lower bounds of PSGDPRO are
# float64 beside float32 parameters, and lose bits. Muon of the same package, without such state, goes on bit for bit. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy heavyball==3.2.1
cat > show.py <<'PYTHON'
import copy
import importlib.metadata

import heavyball
import torch

heavyball.utils.compile_mode = None


def parts(optimizer):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, optimizer(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) ** 2).mean().backward()
        optimizer.step()


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if torch.is_tensor(value) else []


def resumed(optimizer):
    """Number of float64 tensors in the state: saved, loaded; and whether the weights of both trainings are equal."""
    model, steps = parts(optimizer)
    torch.manual_seed(1)
    train(model, steps, range(5))
    weights, state, random = copy.deepcopy(model.state_dict()), copy.deepcopy(steps.state_dict()), torch.get_rng_state()
    train(model, steps, range(5, 15))
    other, other_steps = parts(optimizer)
    other.load_state_dict(weights)
    other_steps.load_state_dict(state)
    doubles = [sum(leaf.dtype == torch.float64 for leaf in leaves(tree["state"])) for tree in (state, other_steps.state_dict())]
    torch.set_rng_state(random)
    train(other, other_steps, range(5, 15))
    return *doubles, all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


print("heavyball", importlib.metadata.version("heavyball"), "torch", torch.__version__)
psgd, muon = resumed(heavyball.PSGDPRO), resumed(heavyball.Muon)
print("PSGDPRO: float64 tensors saved %d, loaded %d, equal weights %s" % psgd)
print("Muon:    float64 tensors saved %d, loaded %d, equal weights %s" % muon)
assert psgd[0] > 0 and psgd[1] == 0 and not psgd[2]
assert muon == (0, 0, True)
PYTHON
venv/bin/python show.py 2> /dev/null
