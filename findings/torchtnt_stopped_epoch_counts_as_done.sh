#!/usr/bin/env bash
# Finding: a torchtnt training that is stopped gracefully in mid-epoch and restored never trains the rest of that epoch, without a word.
# torchtnt 0.2.4, torch 2.13.0, torchdata 0.11.0, CPU. State.stop() ends the loop over the batches as the end of the data does: the epoch counts as
# completed, and the checkpoint of the training's end says so. An epoch of 6 batches is stopped after the 4th and restored with the newest checkpoint:
# the next batch is the first one of the second epoch, also where the loader has a state of its own. Exits with 0 if batches 4 and 5 are missed so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy setuptools==80.9.0
venv/bin/pip install --quiet torchtnt==0.2.4 torchdata==0.11.0
cat > show.py <<'PYTHON'
import logging, os, sys, tempfile, warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
logging.disable(logging.INFO)
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtnt.framework.callbacks import DistributedCheckpointSaver
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit


class Unit(TrainUnit):
    def __init__(self, last=None):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen, self.last = [], last

    def train_step(self, state, data: list):
        self.seen.append((self.train_progress.num_epochs_completed, int(data[0].item())))
        self.model(data[0]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if len(self.seen) == self.last:
            state.stop()


print("torchtnt", version("torchtnt"), "torch", torch.__version__, "torchdata", version("torchdata"))
missed = []
for kind in (DataLoader, StatefulDataLoader):
    folder = tempfile.mkdtemp(dir=".")
    saver = DistributedCheckpointSaver(folder, save_every_n_train_steps=100)
    stopped, restored = Unit(last=4), Unit()
    train(stopped, kind(TensorDataset(torch.arange(6.0)[:, None])), max_epochs=2, callbacks=[saver])
    loader = kind(TensorDataset(torch.arange(6.0)[:, None]))
    DistributedCheckpointSaver.restore_from_latest(folder, restored, train_dataloader=loader)
    train(restored, loader, max_epochs=2)
    print(kind.__name__, "checkpoints:", os.listdir(folder))
    print("  epoch and batch, stopped :", stopped.seen)
    print("  epoch and batch, restored:", restored.seen)
    missed.append({(0, 4), (0, 5)}.isdisjoint(stopped.seen + restored.seen) and restored.seen[0] == (1, 0))
sys.exit(not all(missed))
PYTHON
venv/bin/python show.py
