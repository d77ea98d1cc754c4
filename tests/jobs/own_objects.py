"""A DDP job whose ranks keep state of their own beside the weights; one of them can be killed behind its update.

``own_objects.py DIRECTORY [--late] [--ema missing|empty] [--kill STEP:RANK]``. Prints ``READY rank pid resumed_from``
and ``DONE rank sha256 step``; the digest is of the weights and of all that the rank keeps.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mindx_elastic as mx
from tests.jobs.kit import kill_here, say, wait_for


class Centred(nn.Module):
    """Keeps a running mean of this rank's own in a buffer that no state_dict has."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--late", action="store_true", help="also a list that is changed behind the update")
    parser.add_argument("--ema", choices=["missing", "empty"], help="an average on rank 0; what the others name")
    parser.add_argument("--kill", default="", help="STEP:RANK, on a fresh start: once the others have ended the step")
    return parser.parse_args()


def main() -> None:
    args = parse()
    rank, step = int(os.environ["RANK"]), 0
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(Centred(), nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    model = nn.parallel.DistributedDataParallel(network, broadcast_buffers=False)
    average, updates = AveragedModel(network[3]), {"done": 0}  # the same on all ranks, and behind the update
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
    loader = mx.data.ResumableLoader(data, batch_size=4, shuffle=True)
    torch.manual_seed(rank)
    noise, own = np.random.default_rng(rank), torch.Generator().manual_seed(rank)
    drawn: dict[str, Any] = {"count": 10 * rank, "last": []}
    losses: list[float] = []
    ema: dict[str, torch.Tensor] = {}
    stateful: dict[str, Any] = {"noise": noise, "own": own, "drawn": drawn, "average": average, "updates": updates}
    if args.late:
        stateful["losses"] = losses
    if args.ema and rank == 0:
        ema |= {name: value.clone() for name, value in network.state_dict().items()}
    if args.ema == "empty" or (args.ema and rank == 0):
        stateful["ema"] = ema
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, stateful=stateful, directory=args.directory)
    with guard:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for _ in guard.epochs(2):
            for x, y in loader:
                step = guard.step + 1
                drawn["count"] += 1
                drawn["last"] = [float(noise.normal()), float(torch.rand((), generator=own))]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x + 0.1 * float(noise.normal())), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                average.update_parameters(network[3])
                updates["done"] += 1
                for name, value in network.state_dict().items() if ema else ():
                    ema[name].mul_(0.9).add_(value, alpha=0.1)
                if args.kill == f"{step}:{rank}" and guard.resumed_from_step is None:
                    wait_for(args.directory / f"passed_{step}")
                    kill_here(f"{rank} in step {step}")
                guard.step_end()
                if args.kill.startswith(f"{guard.step}:"):
                    (args.directory / f"passed_{guard.step}").touch()
    kept: list[Any] = [tensor.numpy().tobytes() for tensor in (*network.state_dict().values(), *ema.values())]
    kept += [tensor.numpy().tobytes() for tensor in (*average.state_dict().values(), network[0].mean)]
    kept += [updates, noise.bit_generator.state, own.get_state().tolist(), drawn]
    say(f"LOSSES {rank} {len(losses)}")
    say(f"DONE {rank} {hashlib.sha256(pickle.dumps(kept)).hexdigest()} {guard.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
