"""A training in a dynamic cluster: ``clustered.py [--steps N] [--kill WHERE:STEP:RANK] [--hold-at STEP] [--shared]``.

Each rank saves to ``./ckpt_of_rank/{rank}``. Prints ``READY rank pid resumed_from``, ``HOLD rank step``, ``PASSED rank
step`` and ``DONE rank sha256 step``. ``--kill``: that rank kills itself in that step, unless it has resumed; WHERE:
forward, boundary, or before (the guard is entered). ``--hold-at 5,9``: the ranks wait after these steps until there
is a file ``go5``, ``go9``, or an alarm; unless they have resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mindx_elastic as mx
from mindx_elastic import cluster
from mindx_elastic.guard.stop_save import StopPhase
from tests.jobs.kit import say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill", default="")
    parser.add_argument("--stop", default="", help="STEP:RANK: that rank stops itself (SIGSTOP)")
    parser.add_argument("--hold-at", default="", help="steps, separated by commas")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--snapshot-every", default="0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cluster.init()
    rank, size = cluster.get_rank(), cluster.get_group_size()
    holds = args.hold_at.split(",")

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(6 * 4 * 4 * size * 1.0).reshape(-1, 4) / 100)
    loader = mx.data.ResumableLoader(data, 4, shuffle=True, seed=1, num_workers=args.num_workers)
    directory = "./ckpt" if args.shared else "./ckpt_of_rank/" + str(rank)
    guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=directory, snapshot_every=args.snapshot_every)

    with guard:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        fresh = guard.resumed_from_step is None

        def now(order: str, where: str, step: int) -> bool:
            return fresh and order == f"{where}{step}:{rank}"

        for _ in guard.epochs(args.steps // 6):
            for (x,) in loader:
                step = guard.step + 1
                if now(args.stop, "", step):
                    os.kill(os.getpid(), signal.SIGSTOP)
                loss = model(x + torch.rand(1)).pow(2).mean()
                if now(args.kill, "forward:", step):
                    os.kill(os.getpid(), signal.SIGKILL)
                opt.zero_grad()
                loss.backward()
                opt.step()
                guard.step_end(loss=loss)
                if now(args.kill, "boundary:", step):
                    os.kill(os.getpid(), signal.SIGKILL)
                say(f"PASSED {rank} {guard.step}")
                if str(guard.step) in holds and fresh:
                    say(f"HOLD {rank} {guard.step}")
                    while not os.path.exists(f"go{guard.step}") and guard.stopper.phase is StopPhase.TRAINING:
                        time.sleep(0.02)
                        guard.poll()
                    alarm = guard.stopper.alarm
                    if alarm is not None and alarm.kind != "peer":
                        guard.stopper.step_gate.wait_for_limit(60)  # the coming boundary is the one to stop at

    weights = torch.cat([p.detach().flatten() for p in model.parameters()] + [torch.rand(2)])
    say(f"DONE {rank} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()} {guard.step}")


if __name__ == "__main__":
    main()
