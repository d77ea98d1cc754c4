#!/usr/bin/env bash
# Finding: the checkpoint of Opacus' PrivacyEngine has no clipping bound of adaptive clipping: a loaded training clips and adds noise as at its start.
# opacus 1.6.0, torch 2.13.0, CPU. With clipping="adaptive" each step of the optimizer moves max_grad_norm, and the standard deviation of the noise is a
# multiple of it. save_checkpoint and load_checkpoint keep module, optimizer and accountant; the bound is in none of their states, and the loaded one is
# the argument of make_private. The next step of the same batch with the same noise gives other weights. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy scipy opt-einsum
venv/bin/pip install --quiet --no-deps opacus==1.6.0
cat > show.py <<'PYTHON'
import logging, sys, warnings

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import opacus
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))


def private():
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    adaptive = dict(clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, max_clipbound=10.0)
    engine = PrivacyEngine()
    model, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=0.5, max_grad_norm=4.0, poisson_sampling=False, min_clipbound=0.01, unclipped_num_std=1.0, **adaptive,
    )
    return engine, model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data.tensors[0][:8]), data.tensors[1][:8]).backward()
    optimizer.step()


engine, model, optimizer = private()
for _ in range(20):
    step(model, optimizer)
engine.save_checkpoint(path="checkpoint.pt", module=model, optimizer=optimizer)
other, loaded, its_optimizer = private()
other.load_checkpoint(path="checkpoint.pt", module=loaded, optimizer=its_optimizer)
print("opacus", opacus.__version__, "torch", torch.__version__)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
accounted = [sum(steps for _, _, steps in each.accountant.history) for each in (engine, other)]
print("weights equal:", same, "- steps accounted: %d, loaded: %d" % tuple(accounted))
bounds = float(optimizer.max_grad_norm), float(its_optimizer.max_grad_norm)
print("max_grad_norm: %.4f, loaded: %.4f" % bounds)
for each in ((model, optimizer), (loaded, its_optimizer)):
    torch.manual_seed(2)
    step(*each)
after = all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
print("weights equal after one more step:", after)
sys.exit(not (same and bounds[0] != bounds[1] == 4.0 and not after))
PYTHON
venv/bin/python show.py
