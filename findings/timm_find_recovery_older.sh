#!/usr/bin/env bash
# Finding: the find_recovery() of timm's CheckpointSaver names the older one of the two recovery files that it keeps.
# timm 1.0.31, torch 2.14.1, CPU. save_recovery(epoch, batch) keeps the last two files, so that one is whole while the other is written. find_recovery()
# takes the first in the order of texts: after the batches 50, 100 and 150 of an epoch the one of batch 100, and after 950 and 1000 the one of 1000, only
# because "1" comes before "9". So what is resumed is one interval older than need be, or not, by the numbers' digits. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.14.1 torchvision==0.29.1 timm==1.0.31
cat > show.py <<'PYTHON'
import os
import sys

import timm, torch
from timm.utils import CheckpointSaver


def found(folder, batches):
    os.mkdir(folder)
    model = torch.nn.Linear(2, 2)
    saver = CheckpointSaver(model, torch.optim.SGD(model.parameters(), 0.1), checkpoint_dir=folder, recovery_dir=folder)
    for batch in batches:
        saver.save_recovery(0, batch)
    newest = os.path.basename(saver.curr_recovery_file)
    named = os.path.basename(saver.find_recovery())
    print(f"saved after the batches {batches}; kept {sorted(os.listdir(folder))}; find_recovery() says {named}")
    return named == newest


print("timm", timm.__version__, "torch", torch.__version__)
usual, by_digits = found("usual", [50, 100, 150]), found("digits", [900, 950, 1000])
sys.exit(usual or not by_digits)
PYTHON
venv/bin/python show.py
