"""Seconds from the SIGKILL of one rank until every rank has done the next step, and steps lost: ours beside torchrun.

    python benchmarks/bench_recovery.py [--ranks 2,4] [--rounds 7] [--save-every 40] [--methods spare,restart,...]
    python benchmarks/bench_recovery.py --ranks 2 --methods spare --mebibytes 1024

ResNet-20 on random pictures with SGD and momentum, DDP over gloo on the loopback, one thread a rank; the same model,
step and script for all:

* spare, zygote: `mindx-elastic run --recover in-place`, with a warm spare and without
* restart: `mindx-elastic run`, as it comes
* torchrun: rank 0 writes a checkpoint with `torch.save` every N steps, and every rank loads the newest one at its
  start. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restart fails over gloo

Every rank writes a line with the monotonic clock after each step. The last rank is killed in the middle between two
periodic checkpoints, some seconds after the start (`--warm`), and the clock is read right before. `all again` is the
moment at which the last rank has written the line of the first step that the new process does. Steps lost are those
that some living rank had done.
--mebibytes: a frozen parameter of that size besides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

METHODS = ("spare", "zygote", "restart", "torchrun")
FASTER = {"spare": 25.0, "zygote": 12.0, "restart": 1.0}
"""Targets: how many times faster than torchrun."""
ROOT = Path(__file__).parent.parent
_ON_ITS_WAY_S = 0.04  # no recovery is as fast


@dataclass(frozen=True)
class Recovery:
    """What one kill cost."""

    seconds: float
    steps_lost: int

    def figures(self) -> dict[str, float]:
        return {harness.SECONDS: self.seconds, "steps lost": self.steps_lost}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, comma between them (default 2,4)")
    parser.add_argument("--save-every", type=int, default=40, help="torchrun's checkpoints, in steps (default 40)")
    parser.add_argument("--methods", default=",".join(METHODS), help="which, comma between them")
    parser.add_argument("--warm", type=float, default=12.0, help="seconds of training before the kill (default 12)")
    parser.add_argument("--mebibytes", type=int, default=0, help="of state besides the network's (default 0)")
    parser.add_argument("--job", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.job:
        train(args.job, args.directory, args.save_every, args.mebibytes)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing behind
    report = harness.Report(args)
    chosen = args.methods.split(",")
    more = f", {args.mebibytes} MiB of state besides" if args.mebibytes else ""
    for ranks in map(int, args.ranks.split(",")):
        methods: dict[str, harness.Method] = {
            method: lambda method=method, ranks=ranks: kill_one(method, ranks, args).figures()  # type: ignore[misc]
            for method in chosen
        }
        compared = harness.compare(f"{ranks} ranks, one killed{more}", methods, rounds=args.rounds)
        base, targets = ("torchrun" if "torchrun" in chosen else None), []
        for method in chosen:
            if method in FASTER:
                targets.append(harness.Target(method=method, figure="steps lost", at_most=0.0))
                if base is not None:
                    targets.append(harness.Target(method=method, times_as_fast=FASTER[method]))
        report.add(compared, base=base, targets=targets)
    return report.end()


# --- the job ----------------------------------------------------------------------------------------------------------


def train(method: str, directory: Path, save_every: int, mebibytes: int) -> None:
    """One rank; writes ``STEP rank step pid monotonic`` after each step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    sys.path.insert(0, str(ROOT / "examples" / "resnet_cifar10"))
    from resnet import ResNet20

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    network: Any = ResNet20()
    if mebibytes:
        network.ballast = nn.Parameter(torch.randn(mebibytes << 18), requires_grad=False)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    pictures, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))

    def step(number: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
        os.write(1, f"STEP {dist.get_rank()} {number} {os.getpid()} {time.monotonic()}\n".encode())

    if method == "torchrun":
        with_checkpoints(model, optimizer, directory, step, save_every)
    else:
        with_guard(model, optimizer, directory, step)


def with_guard(model: Any, optimizer: Any, directory: Path, step: Any) -> None:
    import mindx_elastic as mx

    guard = mx.Guard(model=model, optimizer=optimizer, directory=directory)

    def loop() -> None:
        while True:
            step(guard.position.step + 1)
            guard.step_end()

    guard.run(loop)


def with_checkpoints(model: Any, optimizer: Any, directory: Path, step: Any, save_every: int) -> None:
    """What a careful user of torchrun writes."""
    import torch
    import torch.distributed as dist

    path, number = directory / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        number = state["step"]
    while True:
        number += 1
        step(number)
        if number % save_every == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)


# --- the measurement --------------------------------------------------------------------------------------------------


def kill_one(method: str, ranks: int, args: argparse.Namespace) -> Recovery:
    """One job with one kill."""
    with job(method, ranks, args) as (process, folder):
        seconds, lost = follow(process, ranks, args)
        end(process)
        if method in ("spare", "zygote") and not was_in_place(folder / "run" / "events.jsonl"):
            raise RuntimeError(f"{method}: the agent has noted no recovery in place")
        return Recovery(seconds, lost)


@contextmanager
def job(
    method: str, ranks: int, args: argparse.Namespace, *, max_restarts: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A running job and its folder, which are gone afterwards; says what it has written to stderr where that fails."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        arenas = tempfile.mkdtemp(prefix="bench-", dir="/dev/shm")
        folder = Path(name)
        words = command(method, ranks, args, folder)
        if max_restarts is not None:
            words[words.index("--max-restarts") + 1] = str(max_restarts)
        with open(folder / "stderr", "wb+") as errors:
            process = subprocess.Popen(words, env=environment(arenas), stdout=subprocess.PIPE, stderr=errors)
            try:
                yield process, folder
            except BaseException:
                errors.seek(0)
                sys.stderr.write(errors.read().decode(errors="replace")[-5000:])
                raise
            finally:
                end(process)
                shutil.rmtree(arenas, ignore_errors=True)


def command(method: str, ranks: int, args: argparse.Namespace, folder: Path) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
    job = [__file__, "--job", method, "--directory", str(folder), "--save-every", str(args.save_every)]
    job += ["--mebibytes", str(args.mebibytes)]
    if method == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *options, *job]
    if method != "restart":
        options += ["--recover", "in-place", "--spares", "1" if method == "spare" else "0"]
    run_dir = ["--run-dir", str(folder / "run")]
    return [sys.executable, "-m", "mindx_elastic.cli.main", "run", *options, *run_dir, *job]


def environment(arenas: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "MINDX_ARENA_DIR": arenas,
    }


def follow(process: subprocess.Popen[bytes], ranks: int, args: argparse.Namespace) -> tuple[float, int]:
    """Read the job's lines, kill its last rank, and wait until all ranks have done the step that the new process does
    first. Returns the seconds and the steps lost."""
    killed_at, began, done, old = 0.0, 0.0, 0, set[int]()
    after: dict[int, dict[int, float]] = {}  # rank, step: when
    wanted = 0
    for rank, step, pid, at in lines(process):
        began = began or at
        if killed_at == 0.0:
            old.add(pid)
            done = max(done, step if rank < ranks - 1 else 0)
            half_way = step % args.save_every == args.save_every // 2
            if rank == ranks - 1 and half_way and at - began > args.warm:
                killed_at = time.monotonic()
                os.kill(pid, signal.SIGKILL)
            continue
        after.setdefault(rank, {})[step] = at
        if pid not in old and not wanted:
            wanted = step
        elif pid in old and at < killed_at + _ON_ITS_WAY_S:
            done = max(done, step)
        if wanted and sum(wanted in steps for steps in after.values()) == ranks:
            return max(steps[wanted] for steps in after.values()) - killed_at, max(0, done + 1 - wanted)
    raise RuntimeError("the job has ended too early")


def lines(process: subprocess.Popen[bytes]) -> Iterator[tuple[int, int, int, float]]:
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if words[:1] == [b"STEP"]:
            yield int(words[1]), int(words[2]), int(words[3]), float(words[4])


def was_in_place(path: Path) -> bool:
    events = map(json.loads, path.read_text().splitlines())
    return any(event.get("event") == "rejoin" and event.get("outcome") == "in place" for event in events)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=40.0)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
