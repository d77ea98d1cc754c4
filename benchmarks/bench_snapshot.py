"""How long the training thread stands still for one snapshot of its whole state into shared memory.

    python benchmarks/bench_snapshot.py [--sizes 256M,1G,4G] [--rounds 7] [--snapshots 6] [--json FILE]

Each sample is a fresh process that trains a real model (linear layers and norms) with Adam until its parameters and
moments fill the size. The first snapshot is *cold* (nothing of the way has run or has touched its memory), the
following ones are *warm*. All rows write to /dev/shm:

* synchronous: `Guard.step_end` with ``snapshot_every=1``
* overlapped: `Guard.step_end` with a longer interval, and what the next `optimizer.step` waits for the copy; forward
  and backward between take at least twice as long as a memcpy of the state, as they do in reality
* DCP `async_save`: the call (its files are written later, and waited for outside of the measurement)
* `torch.save`: the call

`memcpy` is the floor: a plain memcpy of the same tensors into a warm mapping of /dev/shm. It is measured in the same
process, in turn with the snapshots, and the ratios to it are taken inside a process, because the speed of shared
machines drifts. `step longer` is the whole step with a snapshot against one without: what two cores and one memory bus
lose to the copy, stall included.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import harness

METHODS = ("synchronous", "overlapped", "dcp.async_save", "torch.save")
TARGETS = {"synchronous": 1.15, "overlapped": 0.1}
SHM = Path("/dev/shm")
WIDTH = 2048
EVERY = 4  # steps between overlapped snapshots
_GIB = 1 << 30

Samples = dict[str, list[float]]
"""Seconds: "stall" (first one cold), "memcpy", and for ours "plain" and "with" (whole steps)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=parse_sizes, default="256M,1G,4G", help="of the state, comma between them")
    parser.add_argument("--snapshots", type=int, default=6, help="per process (default 6)")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma between them (default: all)")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.sizes[0], args.snapshots, args.folder)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing behind
    report = harness.Report(args)
    chosen = [method for method in METHODS if method in args.methods.split(",")]
    targets = [
        harness.Target(method=method, figure="warm / memcpy", at_most=TARGETS[method])
        for method in chosen
        if method in TARGETS
    ]
    if "synchronous" in chosen:
        targets.append(harness.Target(method="synchronous", figure="cold / memcpy", at_most=TARGETS["synchronous"]))
    for nbytes in args.sizes:
        if problem := lacks(nbytes):
            print(f"\n{nbytes / _GIB:g} GiB is left out: {problem}")
            continue
        methods: dict[str, harness.Method] = {
            method: lambda method=method, nbytes=nbytes: figures(run_child(method, nbytes, args.snapshots))  # type: ignore[misc]
            for method in chosen
        }
        compared = harness.compare(f"{nbytes / _GIB:g} GiB", methods, rounds=args.rounds)
        report.add(compared, targets=targets, unit="s; ratios")
    return report.end()


def figures(samples: Samples) -> dict[str, float]:
    """Of one process: seconds, and times its own memcpy."""
    floor, warm = statistics.median(samples["memcpy"]), statistics.median(samples["stall"][1:])
    cold = samples["stall"][0]
    found = {"memcpy": floor, "cold": cold, "warm": warm, "cold / memcpy": cold / floor, "warm / memcpy": warm / floor}
    if samples.get("plain"):
        found["step longer"] = statistics.median(samples["with"][1:]) - statistics.median(samples["plain"])
    return found


def parse_sizes(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([MG])i?B?", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r}: give sizes such as 256M or 1G")
        sizes.append(int(float(match[1]) * (1 << (20 if match[2] == "M" else 30))))
    return sizes


def lacks(nbytes: int) -> str | None:
    """What this machine has not enough of: the training, two slots and the floor's mapping lie in memory together."""
    status = os.statvfs(SHM)
    free = status.f_bavail * status.f_frsize
    if free < 3 * nbytes + (64 << 20):
        return f"{SHM} has {free / _GIB:.1f} GiB free, {3 * nbytes / _GIB:.1f} are needed"
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    needed = int(4.5 * nbytes) + _GIB
    if available < needed:
        return f"{available / _GIB:.1f} GiB of memory are available, about {needed / _GIB:.1f} are needed"
    return None


def run_child(method: str, nbytes: int, snapshots: int) -> Samples:
    command = [sys.executable, __file__, "--child", method, "--sizes", f"{nbytes >> 20}M"]
    command += ["--snapshots", str(snapshots)]
    with tempfile.TemporaryDirectory(prefix="bench_snapshot-", dir=SHM) as folder:
        command += ["--folder", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: Samples = json.loads(done.stdout.splitlines()[-1])
    return result


# --- one process ------------------------------------------------------------------------------------------------------


class Training:
    """A model and Adam, `nbytes` of parameters and moments together."""

    def __init__(self, nbytes: int) -> None:
        torch.manual_seed(0)
        numbers = nbytes // 12  # three floats for each parameter
        per_block = WIDTH * (WIDTH + 3)
        blocks = max(1, numbers // per_block)
        layers: list[nn.Module] = []
        with torch.no_grad():
            for _ in range(blocks):
                layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
            rest = max(1, (numbers - blocks * per_block) // (WIDTH + 1))
            layers.append(nn.Linear(WIDTH, rest))
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(4, WIDTH)

    def gradients(self) -> None:
        """One forward and backward."""
        self.model(self.batch).square().mean().backward()

    def gradients_for(self, seconds: float) -> None:
        """As many of them as fill the time."""
        end = time.perf_counter() + seconds
        self.gradients()
        while time.perf_counter() < end:
            self.gradients()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> list[torch.Tensor]:
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*(p.detach() for p in self.model.parameters()), *moments]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Floor:
    """A plain memcpy of all tensors into a warm mapping."""

    def __init__(self, folder: Path, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        size = sum(tensor.nbytes for tensor in tensors)
        with open(folder / "floor", "wb+") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self._map = mmap.mmap(file.fileno(), size)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self.seconds()
        self.seconds()

    def seconds(self) -> float:
        began = time.perf_counter()
        address = self._address
        for tensor in self._tensors:
            ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
            address += tensor.nbytes
        return time.perf_counter() - began


def measure(method: str, nbytes: int, snapshots: int, folder: Path) -> Samples:
    """One process's samples; `folder` lies in shared memory."""
    torch.set_num_threads(1)
    os.environ.update(MINDX_ARENA_DIR=str(folder), MINDX_LOG_LEVEL="ERROR")
    training = Training(nbytes)
    if method in TARGETS:
        return measure_ours(training, folder, snapshots, synchronous=method == "synchronous")
    training.gradients()
    training.update()
    floor = Floor(folder, training.tensors())
    samples: Samples = {"stall": [], "memcpy": []}
    with _SAVERS[method](folder) as save:
        for _ in range(snapshots):
            samples["stall"].append(save(training.state()))
            samples["memcpy"].append(floor.seconds())
            training.gradients()
            training.update()
    return samples


def measure_ours(training: Training, folder: Path, snapshots: int, *, synchronous: bool) -> Samples:
    import mindx_elastic as mx

    every = 1 if synchronous else EVERY
    samples: Samples = {"stall": [], "memcpy": [], "plain": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="bench_snapshot-") as directory:
        guard = mx.Guard(
            model=training.model, optimizer=training.optimizer, directory=directory, signals=(), snapshot_every=every
        )
        with guard:
            training.gradients()
            training.update()  # the moments exist from here on
            floor = Floor(folder, training.tensors())
            samples["memcpy"] += [floor.seconds() for _ in range(3)]
            work_s = 0.0 if synchronous else 2 * min(samples["memcpy"])
            while len(samples["stall"]) < snapshots:
                measure_step(guard, training, work_s, samples)
                if guard.position.step % every == every - 1:
                    samples["memcpy"].append(floor.seconds())
    return samples


def measure_step(guard: Any, training: Training, work_s: float, samples: Samples) -> None:
    """From one boundary to just before the next one; `work_s` seconds of gradients, 0: no overlap to wait for."""
    waited = guard.stopper.update_gate.waited_s
    began = time.perf_counter()
    guard.step_end()
    stall = time.perf_counter() - began
    training.gradients_for(work_s)
    training.update()
    stall += guard.stopper.update_gate.waited_s - waited
    seconds = time.perf_counter() - began
    has_snapshot = work_s == 0.0 or guard.position.step % EVERY == 0
    samples["with" if has_snapshot else "plain"].append(seconds)
    if has_snapshot:
        samples["stall"].append(stall)


@contextmanager
def torch_saver(folder: Path) -> Iterator[Callable[[Any], float]]:
    def save(state: Any) -> float:
        began = time.perf_counter()
        torch.save(state, folder / "state.pt")
        return time.perf_counter() - began

    yield save


@contextmanager
def dcp_saver(folder: Path) -> Iterator[Callable[[Any], float]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it refuses to work without

    def save(state: Any) -> float:
        target = folder / "dcp"
        began = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=target)
        seconds = time.perf_counter() - began
        future.result()
        shutil.rmtree(target)
        return seconds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield save
    dist.destroy_process_group()


_SAVERS = {"dcp.async_save": dcp_saver, "torch.save": torch_saver}


if __name__ == "__main__":
    sys.exit(main())
