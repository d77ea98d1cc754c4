"""What a guard adds to a whole step in which nothing happens, in a natural loop of steps of about 1 ms.

    python benchmarks/bench_idle_step.py [--cases mlp,busy,batchnorm,transformer] [--ranks 1] [--rounds 15]
        [--steps 100] [--snapshot-every 1] [--busy-ms 10] [--size 64]

The loop has a `ResumableLoader` without workers, AdamW, one scheduler and ``guard.step_end(loss=loss)``. Cases:

* mlp: a small network whose step takes about 1 ms
* busy: a very small one, and then a busy wait until the step has taken 1 ms
* batchnorm: a convolution network with BatchNorm, so with buffers that every forward changes
* transformer: four encoder layers, 52 parameters and no buffers
* resnet20: of `examples/`, with 57 buffers; not among the default cases, as its steps are not of 1 ms

Blocks of steps with and without a guard alternate in one process. A guarded block enters a guard of its own, so that
the bare ones run without its optimizer hooks, and its first twelve steps do not count. The figures:

* added: what a step takes longer than in the bare blocks around it; median over the blocks. Everything that the guard
  does is in it: hooks, the looks at some steps (these only in the mean), what it pushes out of the processor's caches
* step_end: the time inside `step_end`, in the loop

Of each the mean, the median and the best tenth of the steps, which shows least of what else runs on the machine.
* cpu: what the training thread's own CPU time of a block grows by, a step; the least that other programs can disturb
* floor: in bare steps, at the place of `step_end`, nothing but the version counters of parameters, buffers and the
  optimizer's tensors and the modes of the modules are read, without a look at them: what any program pays in Python
  that asks whether they have changed. The best tenth

``--snapshot-every 1`` (or a number, or auto) has the guard make snapshots in shared memory meanwhile; ``--busy-ms``
gives the case busy longer steps, and ``--size`` a network of so many MiB of parameters. `longer` is the median of what
is added beside a bare step.

With ``--ranks 2`` it starts torchrun by itself, wraps the network in DDP, and the boundaries go to shared memory.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import harness
import mindx_elastic as mx

_WARM_UP = 12
_BUSY_S = 0.001
_clock = time.perf_counter
_version_of, _mode_of = attrgetter("_version"), itemgetter("training")


def _mlp() -> nn.Module:
    widths = [64, 256, 256, 256, 10]
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _batchnorm() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for inside, outside in ((1, 4), (4, 8)):
        layers += [nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, 32), encoder, nn.Flatten(), nn.Linear(256, 10))


def _resnet20() -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "resnet_cifar10"))
    from resnet import ResNet20

    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Upsample(scale_factor=4), nn.Conv2d(1, 3, 1), ResNet20())


CASES = {
    "mlp": _mlp,
    "busy": lambda: nn.Linear(64, 10),
    "batchnorm": _batchnorm,
    "transformer": _transformer,
    "resnet20": _resnet20,
}
TARGETS = {
    "transformer": {"step_end, median": 20.0},
    "resnet20": {"step_end, median": 60.0},
    "busy": {"longer": 0.03},
}
"""Of an idle step."""
Block = tuple[list[float], float]
"""Seconds of each step, and CPU seconds of the thread a step."""


class Job:
    """The objects of one training."""

    def __init__(self, case: str, *, busy_s: float = _BUSY_S, extra_mib: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = CASES[case]()
        if extra_mib:
            self.model.register_parameter("extra", nn.Parameter(torch.randn(int(extra_mib * 2**18))))
        if dist.is_initialized():
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.busy_s = busy_s if case == "busy" else 0.0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10**6)
        data = torch.utils.data.TensorDataset(torch.randn(1 << 16, 64), torch.randint(0, 10, (1 << 16,)))
        self.loader = mx.data.ResumableLoader(data, batch_size=8, shuffle=True, seed=0)

    def batches(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return itertools.islice(self.loader, count)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        began = _clock()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        while _clock() < began + self.busy_s:
            pass
        return loss

    def bare(self, steps: int) -> Block:
        times: list[float] = []
        before = cpu = 0.0
        for x, y in self.batches(_WARM_UP + steps):
            loss = self.step(x, y)
            now = _clock()
            times.append(now - before)
            before = now
            if len(times) == _WARM_UP:
                cpu = time.thread_time()
        del loss
        return times[_WARM_UP:], (time.thread_time() - cpu) / steps

    def floor(self, steps: int) -> list[float]:
        """The seconds in each step of the reads that `floor` in the module's docstring means."""
        times: list[float] = []
        tensors: list[torch.Tensor] = []
        modes = [vars(module) for module in self.model.modules()]
        for x, y in self.batches(_WARM_UP + steps):
            loss = self.step(x, y)
            if not tensors:
                states = itertools.chain(*(each.values() for each in self.optimizer.state.values()))
                tensors = [*self.model.parameters(), *self.model.buffers(), *states]
            at = _clock()
            [*map(_version_of, tensors)], [*map(_mode_of, modes)]
            times.append(_clock() - at)
        del loss
        return times[_WARM_UP:]

    def guarded(self, steps: int, guard: mx.Guard) -> tuple[Block, list[float]]:
        """The block, and the seconds of each `step_end`."""
        times: list[float] = []
        inside: list[float] = []
        before = cpu = 0.0
        with guard:
            for x, y in self.batches(_WARM_UP + steps):
                loss = self.step(x, y)
                at = _clock()
                guard.step_end(loss=loss)
                now = _clock()
                times.append(now - before)
                inside.append(now - at)
                before = now
                if len(times) == _WARM_UP:
                    cpu = time.thread_time()
            cpu = (time.thread_time() - cpu) / steps
        return (times[_WARM_UP:], cpu), inside[_WARM_UP:]


def measure(job: Job, folder: Path, *, rounds: int, steps: int, snapshot_every: int | str) -> dict[str, list[float]]:
    """By figure: of each round, in microseconds; `longer` is a ratio."""
    found: dict[str, list[float]] = {}
    before = job.bare(steps)
    for _ in range(rounds):
        options: dict[str, Any] = {"resume": "never", "final_save": False, "directory": folder}
        options["snapshot_every"] = snapshot_every
        guard = mx.Guard(
            model=job.model, optimizer=job.optimizer, lr_scheduler=job.scheduler, loader=job.loader, **options
        )
        (own, cpu), inside = job.guarded(steps, guard)
        after = job.bare(steps)
        around, median = [*before[0], *after[0]], statistics.median
        told = {
            "bare step": median(around),
            "added, mean": statistics.fmean(own) - statistics.fmean(around),
            "added, median": median(own) - median(around),
            "added, best tenth": _best(own) - _best(around),
            "added, cpu": cpu - (before[1] + after[1]) / 2,
            "step_end, mean": statistics.fmean(inside),
            "step_end, median": median(inside),
            "step_end, best tenth": _best(inside),
            "floor": _best(job.floor(steps)),
        }
        for name, seconds in told.items():
            found.setdefault(name, []).append(seconds * 1e6)
        found.setdefault("longer", []).append(told["added, median"] / told["bare step"])
        before = after
    return found


def _best(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="mlp,busy,batchnorm,transformer", help=", ".join(CASES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--snapshot-every", default="0", help="steps between snapshots in shared memory, or auto")
    parser.add_argument("--busy-ms", type=float, default=1e3 * _BUSY_S, help="of a step of the case busy")
    parser.add_argument("--size", type=float, default=0.0, help="MiB of parameters beside those of the case")
    harness.add_arguments(parser, rounds=15)
    args = parser.parse_args()
    if args.ranks > 1 and "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run([*launcher, *sys.argv], env=env, check=False).returncode
    logging.getLogger("mindx_elastic").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    report = harness.Report(args) if os.environ.get("RANK", "0") == "0" else None
    shared: list[Any] = [None]
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        for case in args.cases.split(","):
            job = Job(case, busy_s=args.busy_ms / 1e3, extra_mib=args.size)
            every = args.snapshot_every if args.snapshot_every == "auto" else int(args.snapshot_every)
            folder_of = Path(shared[0]) / case
            rows = measure(job, folder_of, rounds=args.rounds, steps=args.steps, snapshot_every=every)
            if report is not None:
                targets = [
                    harness.Target(method=case, figure=figure, at_most=limit)
                    for figure, limit in TARGETS.get(case, {}).items()
                    if args.snapshot_every == "0"
                ]
                title = f"{case}, ranks: {args.ranks}, snapshot_every: {args.snapshot_every}"
                report.add(harness.gathered(title, {case: rows}), targets=targets, unit="us; longer: ratio")
        if dist.is_initialized():
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if report is None else report.end()


if __name__ == "__main__":
    sys.exit(main())
