"""What the guard costs the training thread in a step in which nothing happens.

    python benchmarks/bench_step_overhead.py [--ranks 2] [--rounds 7] [--json FILE]

Starts torchrun by itself. ResNet-20 (270k parameters, 57 BatchNorm buffers), SGD with momentum, a per-step scheduler, a
`ResumableLoader`. All rows come from one run, in interleaved rounds.

* alarm + agreement: `Guard.finish_step`, all that the training thread does to be able to stop
* boundary capture: `Guard.boundary`, and inside it the copy of the buffers alone
* the two usual ways: an all-reduce of one flag a step, and opening and parsing the JSON flag file a step
* a whole training step, bare and guarded
* boundary log: what a replicated (DDP) job writes to shared memory besides, at each boundary and after each forward,
  whole and in its parts
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import harness
import mindx_elastic as mx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "resnet_cifar10"))


CAPTURE = "boundary capture without the buffers' copy"
LOG = "boundary log, together"


def per_call_us(work: Callable[[], object], calls: int) -> float:
    """Microseconds of this thread a call, over `calls` calls: other programs of the machine show less in them."""
    began = time.thread_time_ns()
    for _ in range(calls):
        work()
    return (time.thread_time_ns() - began) / calls / 1e3


class Parts:
    """The objects of one job on one rank."""

    def __init__(self, directory: Path) -> None:
        from resnet import ResNet20

        torch.manual_seed(0)
        self.network: nn.Module = ResNet20()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10**6)
        data = torch.utils.data.TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
        self.loader = mx.data.ResumableLoader(data, batch_size=32, shuffle=True, seed=0)
        self.batch = next(iter(self.loader))
        self.directory = directory

    def guard(self) -> mx.Guard:
        return mx.Guard(
            model=self.network,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.loader,
            directory=self.directory,
            unmanaged="warn",  # the loops here count by themselves
        )

    def step(self) -> None:
        x, y = self.batch
        nn.functional.cross_entropy(self.network(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def measure(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each round, by row."""
    parts = Parts(directory)
    flag = directory / f"flag{os.environ.get('RANK', '0')}.json"
    flag.write_text('{"GracefulExit": 0}')
    tensor = torch.zeros(1, dtype=torch.int32)
    buffers = list(parts.network.buffers())
    copies = [b.clone() for b in buffers]
    rows: dict[str, list[float]] = {}

    def note(row: str, value: float) -> None:
        rows.setdefault(row, []).append(value)

    def read_flag() -> object:
        with open(flag) as file:
            return json.load(file)

    guard = parts.guard()
    parts.step()
    for _ in range(rounds):
        note("training step, bare", per_call_us(parts.step, 10))
        with guard:

            def guarded() -> None:
                parts.step()
                guard.step_end()

            guarded()
            note("training step, guarded", per_call_us(guarded, 10))
            note("guard: alarm + agreement", per_call_us(guard.finish_step, 5000))
            note("guard: boundary capture", per_call_us(guard.boundary, 1000))
        note("copy of the buffers alone", per_call_us(lambda: torch._foreach_copy_(copies, buffers), 1000))
        note("usual: open and parse the flag file", per_call_us(read_flag, 2000))
        if dist.is_initialized():
            note("usual: all-reduce of one flag", per_call_us(lambda: dist.all_reduce(tensor), 300))
    return rows


def measure_log(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each round, by row: what a replica keeps of each boundary in shared memory."""
    from mindx_elastic.capture.collector import Collector
    from mindx_elastic.capture.names import name_targets
    from mindx_elastic.core.position import Position
    from mindx_elastic.memory.arena import RankArena
    from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, BoundaryLog, BoundaryRing
    from mindx_elastic.persist.packer import StatePacker

    parts = Parts(directory)
    targets = name_targets(
        model=parts.network,
        optimizer=parts.optimizer,
        lr_scheduler=parts.scheduler,
        loader=parts.loader,
        scaler=None,
        stateful=None,
    )
    collector = Collector(targets)
    arena = RankArena(Path("/dev/shm"), directory, int(os.environ.get("RANK", "0")))
    log = BoundaryLog(arena, collector, [parts.network], SimpleNamespace(step=1))
    log.begin("bench", 0)
    parts.step()  # its forward makes the first forecast
    collector.copy(Position(1, 1, 1, 1))
    log.at_boundary()
    ring = BoundaryRing(arena.folder / BOUNDARIES_FILE, "bench", 1 << 16)
    packer = StatePacker("plain")
    content = packer.pack(collector.volatile())
    works: dict[str, Callable[[], object]] = {
        "boundary log: at a boundary": log.at_boundary,
        "  did the forecast come true": collector.forecast_came_true,
        "  collect": collector.volatile,
        "  collect and pack": lambda: packer.pack(collector.volatile()),
        "  write to shared memory": lambda: ring.write(0, 1, content),
        "boundary log: after a forward": log._forward_ended,
        "  copy": collector.copy_ahead,
    }
    rows: dict[str, list[float]] = {row: [] for row in works}
    try:
        for _ in range(rounds):
            for row, work in works.items():
                rows[row].append(per_call_us(work, 500))
    finally:
        ring.close()
        log.close()
        arena.remove()
    return rows


def sums(rows: dict[str, list[float]]) -> dict[str, list[float]]:
    """What the rows of a round come to together."""

    def together(one: str, other: str, sign: int = 1) -> list[float]:
        return [a + sign * b for a, b in zip(rows[one], rows[other], strict=True)]

    return {
        CAPTURE: together("guard: boundary capture", "copy of the buffers alone", -1),
        LOG: together("boundary log: at a boundary", "boundary log: after a forward"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.ranks > 1 and "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run([*launcher, *sys.argv], env=env, check=False).returncode
    logging.getLogger("mindx_elastic").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    leads = os.environ.get("RANK", "0") == "0"
    report = harness.Report(args) if leads else None
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), args.rounds)
        rows |= measure_log(Path(folder) / "log", args.rounds)
        if dist.is_initialized():
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    if report is None:
        return 0
    compared = harness.gathered(
        f"{args.ranks} ranks", {row: {"thread": values} for row, values in (rows | sums(rows)).items()}
    )
    targets = [
        harness.Target(method="guard: alarm + agreement", figure="thread", at_most=5.0),
        harness.Target(method=CAPTURE, figure="thread", at_most=150.0),
    ]
    report.add(compared, base="training step, bare", targets=targets, unit="us of the thread's CPU time")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
