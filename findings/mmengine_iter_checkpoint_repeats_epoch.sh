#!/usr/bin/env bash
# Finding: mmengine resumes a checkpoint that was saved inside of an epoch at the epoch's start, and counts on: batches are trained twice, the run gets longer.
# mmengine 0.10.7, torch 2.13.0, CPU. CheckpointHook(by_epoch=False, interval=3) in a training by epochs of 5 iterations. The run is ended after iteration 4 and
# resumed from iter_3.pth: it makes the whole first epoch again, with the same samples, and ends at iteration 13 where the uninterrupted one ends at 10; all that
# is scheduled by iterations is 3 iterations early. (TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD: this version cannot load its own checkpoints since torch 2.6 without it.)
# Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy mmengine==0.10.7 opencv-python-headless
cat > show.py <<'PYTHON'
import shutil

import mmengine
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner

seen = []


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"inputs": torch.tensor([float(index)])}


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, inputs, mode="tensor"):
        seen.append(tuple(inputs.flatten().int().tolist()))
        return {"loss": (self.linear(inputs) ** 2).mean()}


class EndAfter(Hook):
    priority = "LOWEST"

    def __init__(self, iterations):
        self.iterations = iterations

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iterations:
            raise KeyboardInterrupt


def run(resume, end_after=0):
    seen.clear()
    loader = dict(dataset=Numbers(), batch_size=2, sampler=dict(type="DefaultSampler", shuffle=True), collate_fn=dict(type="default_collate"))
    runner = Runner(
        Net(), "work", train_dataloader=loader, train_cfg=dict(by_epoch=True, max_epochs=2), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=3)), custom_hooks=[EndAfter(end_after)],
        resume=resume, randomness=dict(seed=1), log_level="ERROR",
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        pass
    return runner.iter, list(seen)


whole = run(resume=False)
shutil.rmtree("work")
ended = run(resume=False, end_after=4)
resumed = run(resume=True)
print("mmengine", mmengine.__version__, "torch", torch.__version__)
print("in one run: ends at iteration", whole[0], whole[1])
print("resumed from iter_3.pth: ends at iteration", resumed[0], resumed[1])
assert whole[0] == 10 and ended[1] == whole[1][:4]
assert resumed[0] == 13 and resumed[1] == whole[1]
PYTHON
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 venv/bin/python show.py 2> /dev/null | grep -v "Loads checkpoint"
