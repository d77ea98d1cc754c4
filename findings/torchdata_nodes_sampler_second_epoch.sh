#!/usr/bin/env bash
# Finding: a torchdata.nodes pipeline over a RandomSampler that is resumed in its second epoch yields the first epoch's order.
# torchdata 0.11.0, torch 2.13.0, CPU. SamplerWrapper's state is the epoch and how many indices were yielded; of torch's RandomSampler, which has neither
# state_dict nor set_epoch, it iterates a new one and skips that many. With a seeded generator the new one is in the first epoch's order: samples come
# again that the epoch has had, others never come, and nothing is said. In the first epoch the same state resumes right. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet --no-deps torchdata==0.11.0 requests urllib3
cat > show.py <<'PYTHON'
import sys
import torch
import torchdata
from torch.utils.data import RandomSampler
from torchdata.nodes import Loader, SamplerWrapper


def pipeline():
    return Loader(SamplerWrapper(RandomSampler(range(8), generator=torch.Generator().manual_seed(0))))


def resumed(epochs_before):
    """What comes after three samples of an epoch, and what comes after a new process has loaded the state of there."""
    loader = pipeline()
    had = [list(loader) for _ in range(epochs_before)]
    samples = iter(loader)
    first = [next(samples) for _ in range(3)]
    again = pipeline()
    again.load_state_dict(loader.state_dict())
    return had, first, list(samples), list(again)


print("torchdata", torchdata.__version__, "torch", torch.__version__)
found = []
for epochs_before in (0, 1):
    had, first, rest, again = resumed(epochs_before)
    print(f"epoch {epochs_before + 1}: {first}, then {rest}; resumed after the third: {again}")
    found.append(again == rest)
print("come twice in epoch 2:", sorted({*first} & {*again}), "never come:", sorted({*range(8)} - {*first, *again}))
sys.exit(not (found == [True, False] and again == had[0][3:]))
PYTHON
venv/bin/python show.py
