"""Trains a small network, exactly or with one fault that a stop and a resume bring to light.

    python proved.py FAULT DIRECTORY

On several ranks it is DDP.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx

FAULT, DIRECTORY = sys.argv[1:3]
EPOCHS, BATCH = 2, 4


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    random.seed(0)
    x, y = torch.randn(48, 8), torch.randint(0, 3, (48,))
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 3))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    network = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if FAULT == "buffer":
        network.register_buffer("count", torch.zeros(()), persistent=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    data = TensorDataset(x, y)
    named: Any = mx.data.ResumableLoader(data, batch_size=BATCH, shuffle=True, seed=3)
    if FAULT == "hashes":
        names = {f"sample {index}" for index in range(48)}
        order = [int(name.split()[1]) for name in names]
        named = mx.data.ResumableLoader(TensorDataset(x[order], y[order]), batch_size=BATCH)
    guard = mx.Guard(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        loader=named,
        directory=f"{DIRECTORY}/{os.getpid()}" if FAULT == "moves" else DIRECTORY,
        resume="never" if FAULT == "never" else "auto",
    )
    if FAULT == "chance":
        with torch.no_grad():
            network[0].bias.add_(random.SystemRandom().random())
    if FAULT == "crash":
        raise RuntimeError("the disk with the data is not there")
    own_steps = 0

    best: dict[str, Any] = {}

    def step(batch: Any) -> None:
        nonlocal own_steps
        inputs, targets = batch
        own_steps += 1
        if FAULT == "gentler":
            optimizer.param_groups[0]["lr"] = 0.01 if guard.resumed_from_step is None else 0.005
        if FAULT == "buffer":
            network.count.add_(1)
        if FAULT == "freeze" and guard.position.step == 3:
            network[3].eval()
        if FAULT.startswith("scaled_on_") and FAULT.endswith(os.environ.get("RANK", "0")):
            inputs = inputs * (1 + own_steps / 100)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if FAULT == "late_chance" and guard.position.step == 4:
            with torch.no_grad():
                network[4].weight.add_(random.SystemRandom().random())
        if FAULT == "best" and loss.item() < best.get("loss", 100.0) and guard.position.step < 3:
            best.update(loss=loss.item(), state=copy.deepcopy(model.state_dict()))
        guard.step_end(loss=loss, **({"seconds": time.monotonic()} if FAULT == "timed" else {}))
        if FAULT == "slow" and guard.position.step == 2:
            with open(os.environ["MINDX_TEST_READY"] + ".new", "w") as ready:
                ready.write(str(os.getpid()))
            os.rename(ready.name, os.environ["MINDX_TEST_READY"])
            time.sleep(600)
        if FAULT == "draw":
            torch.rand(2)

    with guard:
        if FAULT == "refused" or (FAULT == "refused_later" and guard.resumed_from_step is not None):
            raise mx.errors.UnmanagedStateError("the queue is not named. Write Guard(stateful={'queue': queue})")
        if FAULT == "counter":
            for _ in range(EPOCHS):
                for batch in named:
                    step(batch)
        elif FAULT == "prefetch":
            for _ in guard.epochs(EPOCHS):
                batches = iter(named)
                ahead = next(batches, None)
                while ahead is not None:
                    batch, ahead = ahead, next(batches, None)
                    step(batch)
        else:
            for _ in guard.epochs(EPOCHS):
                for batch in named:
                    step(batch)
                if FAULT == "evaluates":
                    model.eval()
                    for inputs, _ in DataLoader(data, batch_size=BATCH, shuffle=True):
                        model(inputs)
                    model.train()
    if FAULT == "best":
        model.load_state_dict(best.get("state", model.state_dict()))
    print("DONE")


if __name__ == "__main__":
    main()
