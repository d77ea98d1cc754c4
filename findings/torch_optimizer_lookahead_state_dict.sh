#!/usr/bin/env bash
# Finding: torch_optimizer's Lookahead trains with a current torch, and its state_dict() raises.
# torch-optimizer 0.3.0, torch 2.13.0, CPU. The wrapper never calls Optimizer.__init__. step() works; the first checkpoint ends in
# AttributeError: 'Lookahead' object has no attribute '_optimizer_state_dict_pre_hooks'. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet --no-deps torch-optimizer==0.3.0 pytorch-ranger==0.1.1
cat > show.py <<'PYTHON'
import sys
from importlib.metadata import version

import torch
import torch_optimizer

model = torch.nn.Linear(2, 2)
optimizer = torch_optimizer.Lookahead(torch_optimizer.Yogi(model.parameters(), lr=0.01), k=2)
before = model.weight.clone()
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
trained = not torch.equal(before, model.weight)
try:
    optimizer.state_dict()
    problem = "none"
except AttributeError as error:
    problem = str(error)
print("torch-optimizer", version("torch-optimizer"), "torch", torch.__version__)
print("trained:", trained)
print("state_dict():", problem)
sys.exit(not (trained and "_optimizer_state_dict_pre_hooks" in problem))
PYTHON
venv/bin/python show.py
