#!/usr/bin/env bash
# Finding: an epoch over a sampler that is its own iterator never ends with torch 2.13, and gives the first batch's places again and again.
# torch 2.13.0, pytorch-multilabel-balanced-sampler 0.1.3, CPU. BatchSampler takes each batch by itertools.islice(iterator, batch_size), and islice asks
# iter() of it once more: a sampler whose __iter__ sets its count to 0 and returns itself (all three of that package) starts over at each batch.
# 64 samples in batches of 8 are 8 batches; the loop is left after 30. With drop_last=True (another code path) there are 8. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
venv/bin/pip install --quiet --no-deps pytorch-multilabel-balanced-sampler==0.1.3
cat > show.py <<'PYTHON'
import sys
from itertools import islice

import torch
from pytorch_multilabel_balanced_sampler.samplers import RandomClassSampler
from torch.utils.data import DataLoader, TensorDataset

labels = torch.arange(64) % 4
counts = []
for drop_last in (False, True):
    sampler = RandomClassSampler(torch.nn.functional.one_hot(labels, 4))
    loader = DataLoader(TensorDataset(labels), batch_size=8, sampler=sampler, drop_last=drop_last)
    counts.append(len(list(islice(loader, 30))))
    print(f"torch {torch.__version__}, drop_last={drop_last}: {counts[-1]} batches (30: left), len(loader) is {len(loader)}")
sys.exit(counts != [30, 8])
PYTHON
venv/bin/python show.py
