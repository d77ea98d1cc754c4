"""What a guard costs a training on a CUDA device: an idle step, and a snapshot of the whole state in shared memory.

    python benchmarks/bench_cuda.py [--sizes 1G,4G,16G] [--rounds 7] [--steps 50] [--methods idle,synchronous,...]
        [--ranks 2] [--json FILE]

*Idle*: blocks of steps with and without a guard alternate in one process; a block ends with a wait for the device, so
that its time is the device's, too. A block's first 70 steps are not measured: in some of them a guard looks at the
program. `added` is what a step takes longer, `host` what `step_end` takes in the training
thread, `waits` how often a `step_end` of the second half of a block has waited for the device.

*Snapshot* (synchronous, overlapped, dcp, torch.save): a model and Adam that fill the size, in a process of its own each
round; larger models are wider, not deeper. The floor is a copy of the same tensors into page-locked memory on one
stream. `first` and `later` are what the training thread stands still for with ``snapshot_every=1``, the first one
behind a step of one second, as the first step of a process takes. `longer` is what a step with an overlapped snapshot
takes longer than the one before it, in steps of four floors at least. DCP's pinned stager is measured by itself: what
`async_save` waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import bench_snapshot
import harness
import mindx_elastic as mx
from bench_snapshot import SHM, Training, parse_sizes
from mindx_elastic.capture.device_progress import DeviceProgress

METHODS = ("synchronous", "overlapped", "dcp", "torch.save")
_GIB = 1 << 30
_STALLS, _UNLOOKED = 24, 7  # the guard looks at the program's variables at the first steps, and at powers of two
_AHEAD = 70  # steps of a block that are not measured: behind the looks up to step 64
_clock = time.perf_counter


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 6), torch.randn(16, 256, 512)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Twenty layers with BatchNorm: 60 buffers on the device."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(20):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(128, 3, 32, 32)


CASES = {"transformer": transformer, "convolutions": convolutions}


class Job:
    """One training in fp16 with a gradient scaler, whose updates torch queues without a wait (fused AdamW)."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        model, batch = CASES[case]()
        self.model, self.batch = model.cuda(), batch.cuda()
        if dist.is_initialized():
            self.model = nn.parallel.DistributedDataParallel(self.model, device_ids=[0])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10**6)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss: torch.Tensor = self.model(self.batch).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss

    def guard(self, folder: Path, **options: Any) -> mx.Guard:
        return mx.Guard(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=self.scaler,
            directory=folder,
            resume="never",
            final_save=False,
            unmanaged="warn",  # of loops that count by themselves
            **options,
        )


def block(job: Job, steps: int, end_step: Callable[[torch.Tensor], object]) -> float:
    """Seconds a step."""
    for _ in range(_AHEAD):
        end_step(job.step())
    torch.cuda.synchronize()
    began = _clock()
    for _ in range(steps):
        end_step(job.step())
    torch.cuda.synchronize()
    return (_clock() - began) / steps


def measure_idle(case: str, rounds: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """By figure, of each round: milliseconds of a step, microseconds of all else; `waits` is a number of steps."""
    job = Job(case)
    bare: list[float] = []
    added: list[float] = []
    unwaited: list[float] = []
    host: list[float] = []
    waits: list[float] = []
    is_alone = not dist.is_initialized()
    bare.append(block(job, steps, lambda loss: None))
    for _ in range(rounds):
        with job.guard(folder) as guard:
            seconds = block(job, steps, lambda loss: guard.step_end(loss=loss))
            torch.cuda.synchronize()
            inside = []
            for _ in range(steps):
                loss = job.step()
                began = _clock()
                guard.step_end(loss=loss)
                inside.append(_clock() - began)
            host.append(statistics.median(inside))
            if is_alone:
                waits.append(count_waits(job, guard, steps // 2))
        bare.append(block(job, steps, lambda loss: None))
        added.append(seconds - (bare[-1] + bare[-2]) / 2)
        if not is_alone:
            with job.guard(folder) as guard, mock.patch.object(DeviceProgress, "wait_for_update"):
                seconds = block(job, steps, lambda loss: guard.step_end(loss=loss))
            bare.append(block(job, steps, lambda loss: None))
            unwaited.append(seconds - (bare[-1] + bare[-2]) / 2)
    micro = {"added": added, "host": host, **({} if is_alone else {"added, no wait": unwaited})}
    found = {name: [1e6 * seconds for seconds in values] for name, values in micro.items()}
    return {"bare step": [1e3 * seconds for seconds in bare], **found, **({"waits": waits} if is_alone else {})}


def count_waits(job: Job, guard: mx.Guard, steps: int) -> int:
    found = 0
    for _ in range(steps):
        loss = job.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            guard.step_end(loss=loss)
            torch.cuda.set_sync_debug_mode("default")
        found += sum("synchroniz" in str(each.message) for each in caught)
    return found


# --- snapshots ---


def on_device(nbytes: int) -> Training:
    bench_snapshot.WIDTH = next(
        width for width in (8192, 4096, 2048, 512) if nbytes >= 240 * width * width or width == 512
    )
    with torch.device("cuda"):
        training = Training(nbytes)
    training.batch = torch.randn(4096, training.batch.shape[1], device="cuda")
    training.gradients()
    training.update()
    return training


def floor_s(tensors: list[torch.Tensor], host: torch.Tensor) -> float:
    torch.cuda.synchronize()
    began, at = _clock(), 0
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        host[at : at + flat.numel()].copy_(flat, non_blocking=True)
        at += flat.numel()
    torch.cuda.synchronize()
    return _clock() - began


def measure_snapshot(nbytes: int, method: str, folder: Path) -> dict[str, float]:
    os.environ.update(MINDX_ARENA_DIR=str(folder), MINDX_LOG_LEVEL="ERROR")
    training = on_device(nbytes)
    tensors = [t for t in training.tensors() if t.is_cuda]
    host = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8, pin_memory=True)
    floor = min(floor_s(tensors, host) for _ in range(4))
    del host
    if method == "dcp":
        return {"floor": floor, **measure_dcp(training)}
    if method == "torch.save":
        torch.cuda.synchronize()
        began = _clock()
        torch.save(training.state(), folder / "state.pt")
        return {"floor": floor, "first": _clock() - began}
    with tempfile.TemporaryDirectory() as directory:
        every = 1 if method == "synchronous" else 8
        guard = mx.Guard(
            model=training.model,
            optimizer=training.optimizer,
            directory=directory,
            signals=(),
            snapshot_every=every,
            final_save=False,
            unmanaged="warn",
        )
        with guard:
            return {"floor": floor, **(stalls(guard, training) if every == 1 else overlaps(guard, training, floor))}


def stalls(guard: mx.Guard, training: Training) -> dict[str, float]:
    found = []
    for number in range(_STALLS):
        training.gradients()
        training.update()
        torch.cuda.synchronize()
        if number == 0:
            time.sleep(1.0)
        began = _clock()
        guard.step_end()
        found.append(_clock() - began)
    return {"first": found[0], "later": statistics.median(found[-_UNLOOKED:])}


def overlaps(guard: mx.Guard, training: Training, floor: float) -> dict[str, float]:
    """Steps that keep the device busy for four floors."""
    torch.cuda.synchronize()
    began = _clock()
    training.gradients()
    torch.cuda.synchronize()
    times = max(1, round(4 * floor / (_clock() - began)))
    longer: list[float] = []
    plain: list[float] = []
    before = 0.0
    for number in range(1, 41):
        torch.cuda.synchronize()
        began = _clock()
        for _ in range(times):
            training.gradients()
        training.update()
        guard.step_end()
        torch.cuda.synchronize()
        seconds = _clock() - began
        # The copy of boundary 8 runs beside step 9.
        if number > 16 and number % 8 == 1:
            longer.append(seconds - before)
            plain.append(before)
        before = seconds
    return {"longer": statistics.median(longer), "plain": statistics.median(plain)}


def measure_dcp(training: Training) -> dict[str, float]:
    """The staging alone, each time with a new stager: that of torch 2.11 forgets its memory and its table of types
    behind each staging, and a second one fails."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(
        use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
    )
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = _clock()
        DefaultStager(options).stage(plain(training.state()))
        found.append(_clock() - began)
    return {"first": found[0], "later": statistics.median(found[1:])}


def plain(state: Any) -> Any:
    """The stager of torch 2.11 fails at other kinds of dicts than the plain one."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, (list, tuple)) else state


def run_child(nbytes: int, method: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", method, "--sizes", f"{nbytes >> 20}M"]
    with tempfile.TemporaryDirectory(prefix="bench_cuda-", dir=SHM) as folder:
        done = subprocess.run([*command, "--folder", folder], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_snapshots(nbytes: int, rounds: int, methods: list[str]) -> harness.Comparison:
    """Milliseconds, and ratios to the floor or to the step without a snapshot."""
    methods = [method for method in methods if method != "torch.save" or nbytes <= 4 * _GIB]
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for method in methods if number % 2 == 0 else reversed(methods):
            try:
                one = run_child(nbytes, method)
            except subprocess.CalledProcessError as error:  # the others' figures are worth having all the same
                print(f"  {method}: failed with exit code {error.returncode}", flush=True)
                continue
            told = {name: 1e3 * seconds for name, seconds in one.items()}
            for name in one.keys() & {"first", "later", "longer"}:
                base = "plain" if name == "longer" else "floor"
                told[f"{name} / {base}"] = one[name] / one[base]
            for name, value in told.items():
                found.setdefault(method, {}).setdefault(name, []).append(value)
    return harness.gathered(f"snapshot, {nbytes / _GIB:g} GiB", found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=parse_sizes, default="1G,4G,16G")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--methods", default=",".join(("idle", *METHODS)))
    parser.add_argument("--ranks", type=int, default=1, help="of an idle step, the only thing measured then")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_snapshot(args.sizes[0], args.child, args.folder)))
        return 0
    if not torch.cuda.is_available():
        sys.exit("bench_cuda.py needs a CUDA device")
    if args.ranks > 1:
        if "RANK" not in os.environ:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
            return subprocess.run([sys.executable, *launcher, *sys.argv], check=False).returncode
        # Each tells NCCL that it is on a machine of its own, or it would refuse that they share a device.
        os.environ.update(NCCL_HOSTID=f"rank-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    report = open_report(args) if os.environ.get("RANK", "0") == "0" else None
    if "idle" in args.methods:
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                shared: list[Any] = [folder]
                if args.ranks > 1:
                    dist.broadcast_object_list(shared, device=torch.device("cuda", 0))
                figures = measure_idle(case, args.rounds, args.steps, Path(shared[0]))
                if report is not None:
                    title = f"idle, {case}, {args.ranks} ranks, {args.steps // 2} steps watched for waits a round"
                    report.add(harness.gathered(title, {case: figures}), unit="step: ms, else us")
                if args.ranks > 1:
                    dist.barrier()
    if args.ranks > 1:
        dist.destroy_process_group()
    elif methods := [method for method in METHODS if method in args.methods.split(",")]:
        for nbytes in args.sizes:
            compared = compare_snapshots(nbytes, args.rounds, methods)
            if report is not None and compared.figures:
                report.add(compared, unit="ms; ratios")
    return 0 if report is None else report.end()


def open_report(args: argparse.Namespace) -> harness.Report:
    report = harness.Report(args)
    device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    report.setting["device"] = device
    print(f"device    {device}", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
