#!/usr/bin/env bash
# Finding: a GradualWarmupScheduler that was loaded never changes the learning rate again, without a word.
# warmup-scheduler 0.3, torch 2.13.0, CPU. Its state_dict has the scheduler after the warm-up as an object, and with it a copy of the optimizer. After
# load_state_dict that copy is what the schedule steps: its rate falls as it should, that of the optimizer which trains stays for ever what it was at
# the save. Model, optimizer and scheduler are saved in step 6 of 12 and loaded into new ones. Exits with 0 if the rates differ so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet --no-deps --no-build-isolation setuptools wheel
venv/bin/pip install --quiet --no-deps --no-build-isolation warmup-scheduler==0.3
cat > show.py <<'PYTHON'
import io, sys, warnings
from importlib.metadata import version
import torch
from warmup_scheduler import GradualWarmupScheduler

warnings.simplefilter("ignore")  # torch's, of an argument that the package still gives


def parts():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return model, optimizer, GradualWarmupScheduler(optimizer, multiplier=1, total_epoch=3, after_scheduler=after)


def rates(optimizer, scheduler, steps):
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(round(optimizer.param_groups[0]["lr"], 5))
    return found


_, optimizer, scheduler = parts()
uninterrupted = rates(optimizer, scheduler, 12)[6:]
first = parts()
rates(*first[1:], 6)
file = io.BytesIO()
torch.save([each.state_dict() for each in first], file)
second = parts()
file.seek(0)
for each, state in zip(second, torch.load(file, weights_only=False)):
    each.load_state_dict(state)
loaded = rates(*second[1:], 6)
copy = second[2].after_scheduler.optimizer
print("warmup-scheduler", version("warmup-scheduler"), "torch", torch.__version__)
print("rates, uninterrupted:", uninterrupted)
print("rates, loaded       :", loaded)
print("steps another optimizer:", copy is not second[1], "whose rate is", round(copy.param_groups[0]["lr"], 5))
sys.exit(not (len(set(loaded)) == 1 and len(set(uninterrupted)) > 2 and copy is not second[1]))
PYTHON
venv/bin/python show.py
