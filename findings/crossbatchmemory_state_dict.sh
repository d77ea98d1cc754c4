#!/usr/bin/env bash
# Finding: the state_dict of pytorch-metric-learning's CrossBatchMemory has its memory and not where it ends.
# pytorch-metric-learning 2.9.0, torch 2.13.0, CPU. Half of a memory of 8 rows is filled; its state_dict is loaded into a fresh one. embedding_memory and
# label_memory come back, queue_idx and has_been_filled do not: the loaded memory takes itself for empty, and the next batch overwrites the oldest
# rows as if they were the only ones, so the loss of the same batch differs. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy scikit-learn tqdm
venv/bin/pip install --quiet --no-deps pytorch-metric-learning==2.9.0
cat > show.py <<'PYTHON'
import copy, sys
import pytorch_metric_learning
import torch
from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory

torch.manual_seed(0)
bank, fresh = (CrossBatchMemory(ContrastiveLoss(), embedding_size=3, memory_size=8) for _ in range(2))
bank(torch.randn(4, 3), torch.arange(4))
print(fresh.load_state_dict(copy.deepcopy(bank.state_dict())))
print("pytorch-metric-learning", pytorch_metric_learning.__version__, "torch", torch.__version__)
print("rows equal:", torch.equal(bank.embedding_memory, fresh.embedding_memory))
print("queue_idx:", bank.queue_idx, "loaded:", fresh.queue_idx)
x, y = torch.randn(4, 3), torch.arange(4)
losses = [float(each(x, y)) for each in (bank, fresh)]
print("loss of the next batch: %.6f, loaded: %.6f" % tuple(losses))
sys.exit(losses[0] == losses[1])
PYTHON
venv/bin/python show.py
