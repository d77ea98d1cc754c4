#!/usr/bin/env bash
# Finding: AdaLoRA of peft, resumed from the full state_dict and the optimizer's, keeps other ranks than it would have, or raises in its last steps.
# peft 0.21.2, torch 2.13.0, CPU. The running importance of each rank and the final rank pattern are plain attributes of the allocator and the configuration. Of
# 24 steps: stopped at 8, other ranks survive; stopped just before the last allocation, update_and_allocate() raises KeyError; stopped after it, AttributeError
# ('NoneType' object has no attribute 'keys'). Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy peft==0.21.2
cat > show.py <<'PYTHON'
import copy

import peft
import torch
from torch import nn

STEPS = 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 32)
        self.b = nn.Linear(32, 8)

    def forward(self, inputs):
        return self.b(torch.relu(self.a(inputs)))


def parts():
    torch.manual_seed(0)
    config = peft.AdaLoraConfig(target_modules=["a", "b"], init_r=8, target_r=4, tinit=4, tfinal=4, deltaT=1, total_step=STEPS)
    model = peft.get_peft_model(Net(), config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in steps:
        seeded = torch.Generator().manual_seed(step)
        inputs, wanted = torch.randn(16, 8, generator=seeded), torch.randn(16, 8, generator=seeded)
        optimizer.zero_grad()
        ((model(inputs) - wanted) ** 2).mean().backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)


def ranks(model):
    return {name: tuple((values != 0).flatten().tolist()) for name, values in model.named_parameters() if "lora_E" in name}


def resumed(stop):
    model, optimizer = parts()
    train(model, optimizer, range(1, stop + 1))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(stop + 1, STEPS + 1))
    other, other_optimizer = parts()
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    try:
        train(other, other_optimizer, range(stop + 1, STEPS + 1))
    except (KeyError, AttributeError) as error:
        return type(error).__name__
    return "same ranks" if ranks(other) == ranks(model) else "other ranks"


print("peft", peft.__version__, "torch", torch.__version__)
seen = {stop: resumed(stop) for stop in range(5, STEPS)}
for stop, what in seen.items():
    print("stopped at step", stop, "of", STEPS, "and resumed:", what)
assert "other ranks" in seen.values() and "KeyError" in seen.values() and seen[STEPS - 1] == "AttributeError"
PYTHON
venv/bin/python show.py 2> /dev/null
