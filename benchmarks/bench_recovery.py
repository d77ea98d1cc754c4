"""Seconds from the SIGKILL of one rank to the first step after the restart, and steps lost: ours beside torchrun.

    python benchmarks/bench_recovery.py [--ranks 2,4] [--rounds 5] [--save-every 40]

ResNet-20 on random pictures with SGD and momentum, DDP over gloo on the loopback, one thread a rank; the same model,
step and script for both:

* mindx-elastic: `mindx-elastic run` and a `Guard`, as they come
* torchrun: rank 0 writes a checkpoint with `torch.save` every N steps, and every rank loads the newest one at its
  start. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restart fails over gloo

Every rank writes a line with the monotonic clock after each step. The last rank is killed in the middle between two
periodic checkpoints, and the clock is read right before. `first step` is the first line of any rank after the restart,
`new step` the first line of a step that had not been done before the kill. Rounds alternate between the two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("mindx-elastic", "torchrun")
ROOT = Path(__file__).parent.parent
_LIMIT_S = 120.0
_MORE_STEPS = 5


@dataclass(frozen=True)
class Recovery:
    """What one kill cost."""

    first_step_s: float
    new_step_s: float
    steps_lost: int
    parts: dict[str, float]
    """Ours: what the agent itself has noted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, comma between them (default 2,4)")
    parser.add_argument("--rounds", type=int, default=5, help="kills per method (default 5)")
    parser.add_argument("--save-every", type=int, default=40, help="torchrun's checkpoints, in steps (default 40)")
    parser.add_argument("--job", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--num-steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        train(args.job, args.directory, args.save_every, args.num_steps)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing behind
    print_setting()
    for ranks in map(int, args.ranks.split(",")):
        found: dict[str, list[Recovery]] = {method: [] for method in METHODS}
        for number in range(args.rounds):
            for method in METHODS if number % 2 == 0 else METHODS[::-1]:
                found[method].append(kill_one(method, ranks, args.save_every))
        print_table(found, ranks, args.save_every)


# --- the job ----------------------------------------------------------------------------------------------------------


def train(method: str, directory: Path, save_every: int, num_steps: int) -> None:
    """One rank; prints ``STEP rank step pid monotonic`` after each step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    sys.path.insert(0, str(ROOT / "examples" / "resnet_cifar10"))
    from resnet import ResNet20

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(ResNet20())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pictures, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))

    def step(number: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
        os.write(1, f"STEP {rank} {number} {os.getpid()} {time.monotonic()}\n".encode())

    if method == "mindx-elastic":
        with_guard(model, optimizer, directory, step, num_steps)
    else:
        with_checkpoints(model, optimizer, directory, step, num_steps, save_every)
    dist.destroy_process_group()


def with_guard(model: Any, optimizer: Any, directory: Path, step: Any, num_steps: int) -> None:
    import mindx_elastic as mx

    with mx.Guard(model=model, optimizer=optimizer, directory=directory) as guard:
        while guard.position.step < num_steps:
            step(guard.position.step + 1)
            guard.step_end()


def with_checkpoints(model: Any, optimizer: Any, directory: Path, step: Any, num_steps: int, save_every: int) -> None:
    """What a careful user of torchrun writes."""
    import torch
    import torch.distributed as dist

    path, number = directory / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        number = state["step"]
    while number < num_steps:
        number += 1
        step(number)
        if number % save_every == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)


# --- the measurement --------------------------------------------------------------------------------------------------


def kill_one(method: str, ranks: int, save_every: int) -> Recovery:
    """One job with one kill, from its start to its end."""
    kill_at = save_every + save_every // 2
    with tempfile.TemporaryDirectory(prefix="bench_recovery-") as name:
        arenas = tempfile.mkdtemp(prefix="bench_recovery-", dir="/dev/shm")
        folder = Path(name)
        with open(folder / "stderr", "wb+") as errors:
            process = subprocess.Popen(
                command(method, ranks, save_every, folder, kill_at + _MORE_STEPS),
                env=environment(arenas),
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            try:
                recovery = follow(process, ranks, kill_at, folder)
                if process.wait(_LIMIT_S) != 0:
                    raise RuntimeError(f"{method} has ended with {process.returncode}")
            except BaseException:
                errors.seek(0)
                sys.stderr.write(errors.read().decode(errors="replace")[-5000:])
                raise
            finally:
                end(process)
                shutil.rmtree(arenas, ignore_errors=True)
    return recovery


def command(method: str, ranks: int, save_every: int, folder: Path, num_steps: int) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
    job = [__file__, "--job", method, "--directory", str(folder), "--save-every", str(save_every)]
    job += ["--num-steps", str(num_steps)]
    if method == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *options, *job]
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


def follow(process: subprocess.Popen[bytes], ranks: int, kill_at: int, folder: Path) -> Recovery:
    """Read the job's lines, kill its last rank behind step `kill_at`, and wait for its first new step."""
    killed_at, done, old = 0.0, 0, set[int]()
    first: float | None = None
    lost = -1
    for rank, step, pid, at in lines(process):
        if killed_at == 0.0:
            old.add(pid)
            done = max(done, step)
            if rank == ranks - 1 and step == kill_at:
                killed_at = time.monotonic()
                os.kill(pid, signal.SIGKILL)
        elif pid in old:
            done = max(done, step)  # ended, and its line was on the way
        else:
            if first is None:
                first, lost = at - killed_at, done + 1 - step
            if step > done:
                new_step_s = at - killed_at
                for _ in lines(process):
                    pass  # until it ends
                return Recovery(first, new_step_s, lost, noted_parts(folder / "run" / "events.jsonl"))
    raise RuntimeError("the job has ended too early")


def lines(process: subprocess.Popen[bytes]) -> Iterator[tuple[int, int, int, float]]:
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if words[:1] == [b"STEP"]:
            yield int(words[1]), int(words[2]), int(words[3]), float(words[4])


def noted_parts(path: Path) -> dict[str, float]:
    """What the agent has written about the attempt that failed."""
    if not path.exists():
        return {}
    events = [json.loads(line) for line in path.read_text().splitlines()]
    records = [event for event in events if event.get("event") == "attempt" and event.get("detect_s") is not None]
    return (
        {key: records[0][key] or 0.0 for key in ("detect_s", "save_s", "restart_s", "first_step_s")} if records else {}
    )


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40.0)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


# --- what is printed --------------------------------------------------------------------------------------------------


def print_setting() -> None:
    import torch

    cpu = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        cpu = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), cpu)
    print(f"command   {shlex.join(['python', *sys.argv])}")
    print(f"machine   {os.cpu_count()} x {cpu}, {platform.system()} {platform.release()}")
    print(f"versions  python {platform.python_version()}, torch {torch.__version__}")


def print_table(found: dict[str, list[Recovery]], ranks: int, save_every: int) -> None:
    print(f"\n{ranks} ranks, one killed, checkpoints of torchrun every {save_every} steps; seconds, medians")
    print(f"  {'':<15} {'kills':>5} {'first step':>11} {'min':>6} {'max':>6} {'new step':>9} {'steps lost':>11}")
    medians = {}
    for method, recoveries in found.items():
        seconds = [recovery.first_step_s for recovery in recoveries]
        medians[method] = statistics.median(seconds)
        new = statistics.median(recovery.new_step_s for recovery in recoveries)
        lost = max(recovery.steps_lost for recovery in recoveries)
        line = f"  {method:<15} {len(seconds):>5} {medians[method]:>11.2f} {min(seconds):>6.2f} {max(seconds):>6.2f}"
        print(f"{line} {new:>9.2f} {lost:>11}")
    ratio = medians["mindx-elastic"] / medians["torchrun"]
    lost = max(recovery.steps_lost for recovery in found["mindx-elastic"])
    verdict = "met" if ratio <= 1.0 and lost == 0 else "MISSED"
    print(f"  mindx-elastic / torchrun: {ratio:.2f}, {lost} steps lost (target: at most 1, and 0): {verdict}")
    parts = [recovery.parts for recovery in found["mindx-elastic"] if recovery.parts]
    if parts:
        print(
            "  noted by the agent, seconds since the kill: "
            + ", ".join(f"{key.removesuffix('_s')} {statistics.median(p[key] for p in parts):.2f}" for key in parts[0])
        )


if __name__ == "__main__":
    main()
