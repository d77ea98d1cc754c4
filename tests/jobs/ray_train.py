"""Ray Train runs a guarded loop on two workers: ``ray_train.py FOLDER [KILL_AT]``. Rank 1 kills itself at that step,
once. Prints what ``fit`` says; each rank writes its hash, and the step that it has resumed from, to ``FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def loop(config: dict[str, Any]) -> None:
    import hashlib
    import os
    import signal

    import ray.train
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import mindx_elastic as mx

    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3)))
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    optimizer = torch.optim.AdamW(model.parameters())
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=folder / "ckpt")
    with guard:
        for _ in guard.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                guard.step_end()
                if rank == 1 and guard.step == config["kill_at"] and guard.resumed_from_step is None:
                    os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    (folder / f"rank_{rank}.txt").write_text(f"{digest} {guard.resumed_from_step}")


if __name__ == "__main__":
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": sys.argv[1], "kill_at": int((*sys.argv, "0")[2])},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=1)),
    )
    print("FIT", trainer.fit().error)
    ray.shutdown()
