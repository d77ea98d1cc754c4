"""A short training for a batch system: DDP under a launcher, alone without one. Prints ``STEP n`` and ``HASH h``.

``slurm.py DIRECTORY PAUSE``: PAUSE is a file with the seconds that each step takes, so that a test can hurry it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch

import mindx_elastic as mx


def main() -> None:
    directory, pause = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(320, 20), torch.randint(0, 2, (320,)))
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = mx.data.ResumableLoader(data, batch_size=16, shuffle=True, seed=0)
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=directory, prefix="mlp")
    with guard:
        for _ in guard.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                print("STEP", guard.position.step + 1, flush=True)
                time.sleep(float(pause.read_text()))
                guard.step_end()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("HASH", hashlib.sha256(weights).hexdigest()[:16], "resumed from", guard.resumed_from_step, flush=True)


if __name__ == "__main__":
    main()
