"""Trains until it is ended, for an auditor beside it.

    python audited.py KIND DIRECTORY

KIND: ``natural`` (loader workers, augmentation, dropout, BatchNorm, accumulation, two optimizers, an average of the
weights), ``network`` or ``shards`` (FSDP2); AUDITED_FAULT: what is done to the job's own
process in the middle of every 40 steps, to rank AUDITED_RANK; ``hidden`` or ``chance``: what the program does in any
process. AUDITED_WRITES: it writes into a file of its own.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import mindx_elastic as mx

KIND, DIRECTORY = sys.argv[1:3]
FAULT, HIT = os.environ.get("AUDITED_FAULT", ""), os.environ.get("AUDITED_RANK", "0")
RANK, RANKS = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
IS_JOB = "MINDX_PROVE" not in os.environ


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 72

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        sample = torch.randn(8, generator=generator)
        return sample + 0.1 * torch.randn(8) + 0.1 * random.random(), int(sample.sum() > 0)


def flip(tensor: Any) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.detach().view(-1).view(torch.int32)[:1] ^= 1 << 20


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    network: Any = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2))
    if KIND == "shards":
        network = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 2))
        torch.distributed.fsdp.fully_shard(network, mesh=torch.distributed.init_device_mesh("cpu", (RANKS,)))
    model = nn.parallel.DistributedDataParallel(network) if RANKS > 1 and KIND != "shards" else network
    optimizers: list[Any] = [torch.optim.AdamW(network.parameters(), lr=1e-3)]
    stateful: dict[str, Any] = {}
    if KIND == "natural":
        optimizers = [torch.optim.AdamW(network[:2].parameters()), torch.optim.SGD(network[4].parameters(), lr=0.01)]
        stateful["ema"] = AveragedModel(network)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 10, 0.99) for each in optimizers]
    workers = 2 * (KIND == "natural")
    loader: Any = mx.data.ResumableLoader(Samples(), batch_size=4, shuffle=True, seed=3, num_workers=workers)
    guard = mx.Guard(
        model=model,
        optimizer=optimizers,
        lr_scheduler=schedulers,
        loader=loader,
        stateful=stateful,
        directory=DIRECTORY,
    )
    own = 0
    with guard:
        for _ in guard.epochs(1 << 20):
            for batch in loader:
                inputs, targets = batch
                own += 1
                step = guard.position.step + 1
                fault = FAULT if IS_JOB and step % 40 == 20 and RANK == HIT else ""
                if fault == "batch":
                    flip(inputs)
                elif fault == "weights":
                    flip(network[0].weight.data)
                elif fault == "moments":
                    flip(optimizers[0].state[network[0].weight]["exp_avg"])
                if FAULT == "hidden":
                    inputs = inputs * (1 + own / 1000)
                elif FAULT == "chance":
                    inputs = inputs + random.SystemRandom().random() / 100
                if "AUDITED_WRITES" in os.environ and RANK == "0" and own == 3:
                    with open(f"{DIRECTORY}.csv", "a") as file:
                        file.write("a line\n")
                loss = cross_entropy(model(inputs), targets)
                (loss / 2 if KIND == "natural" else loss).backward()
                if fault == "gradient":
                    flip(network[0].weight.grad)
                if KIND != "natural" or step % 2 == 0:
                    for each in (*optimizers, *schedulers):
                        each.step()
                    for each in optimizers:
                        each.zero_grad()
                    for each in stateful.values():
                        each.update_parameters(network)
                guard.step_end(loss=loss)
                if RANK == "0" and step == 24:
                    print("TRAINS", flush=True)
                if IS_JOB:
                    time.sleep(0.02)


if __name__ == "__main__":
    main()
