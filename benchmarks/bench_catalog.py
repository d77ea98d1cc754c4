"""Seconds to find, read and judge the checkpoint files of a large job in one process, as `mindx-elastic plan` does.

    python benchmarks/bench_catalog.py [--ranks 4096] [--steps 4] [--tensors 40] [--rounds 5] [--directory DIR]

The files are real ones, small, of DDP ranks with Adam. `list` finds them, `read` opens each and parses and checks its
header, `merge` and `plan` choose the step; `seconds` is all of it. The files have just been written or read, so they
come from the page cache ("warm"). `cpu` is the process's CPU time, which says more on a busy machine. `plan command` is
the whole of `mindx-elastic plan --json` in a process of its own, the import of torch included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import xxhash

import harness
from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.core.strategy import LaidOut, LayoutRecord
from mindx_elastic.persist.entries import place_tensors
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.format import CheckpointInfo, HeaderDraft, seal_header
from mindx_elastic.start.facts import ResumePlan, World
from mindx_elastic.start.findings import list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory

TARGET_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4, help="that each rank has saved (default 4)")
    parser.add_argument("--tensors", type=int, default=40, help="parameters of the model (default 40)")
    parser.add_argument("--directory", type=Path, default=Path(), help="disk to write to (default: here)")
    harness.add_arguments(parser, rounds=5)
    args = parser.parse_args()
    report = harness.Report(args)
    with tempfile.TemporaryDirectory(prefix="bench_catalog-", dir=args.directory) as name:
        root = Path(name)
        began = time.perf_counter()
        write_files(root, args.ranks, args.steps, args.tensors)
        print(f"written in {time.perf_counter() - began:.0f} s", flush=True)
        methods: dict[str, harness.Method] = {
            "catalog": lambda: judge(root, args.ranks, 10 * args.steps),
            "plan command": lambda: command(root),
        }
        compared = harness.compare(f"{args.ranks * args.steps} files", methods, rounds=args.rounds, warm_up=1)
    report.add(compared, targets=[harness.Target(method=method, at_most=TARGET_S) for method in methods])
    return report.end()


def write_files(root: Path, world_size: int, steps: int, num_tensors: int) -> None:
    """As the writer makes them, without its flushes: nothing has to outlive a crash of the machine. The weights and the
    learning rate differ from step to step, the random numbers and the position from file to file."""
    whole = Layout((world_size,), (parse_placement("R"),))
    names = [f"layers.{number}.weight" for number in range(num_tensors)]
    weights = {name: torch.zeros(2, 2) for name in names}
    moments = {
        number: {"step": torch.zeros(()), "exp_avg": torch.zeros(2, 2), "exp_avg_sq": torch.zeros(2, 2)}
        for number in range(num_tensors)
    }
    for rank in range(world_size):
        folder = root / f"rank_{rank}"
        folder.mkdir()
        record = LayoutRecord(
            rank=rank, world_size=world_size, default=LaidOut(whole, (), False), modules=["model", "optimizer"]
        )
        for step in range(10, 10 * steps + 1, 10):
            words = torch.full((625,), rank * step, dtype=torch.int64)
            group = {"lr": 0.1 / step, "betas": (0.9, 0.999), "params": [*range(num_tensors)]}
            state = {
                "model": weights,
                "optimizer": {"state": moments, "param_groups": [group]},
                "lr_scheduler": {"last_epoch": step, "_last_lr": [0.1 / step]},
                "loader": {"kind": "resumable", "samples": 32 * step + rank, "batch": step},
                "rng": {"python": {"version": 3, "words": words, "gauss": None}, "torch": words, "drawn": rank + step},
                "progress": {"step": step, "epoch": 1, "step_in_epoch": step},
                "module_extras": {"model": {"training": names, "eval": [], "trainable": names}},
            }
            tree, tensors = flatten(state)
            entries = place_tensors(tensors)
            same, own = (xxhash.xxh3_128_hexdigest(str(of).encode()) for of in (step, (step, rank)))
            digests = {entry.name: own if entry.name.startswith("rng") else same for entry in entries}
            info = CheckpointInfo(
                run_id="run", world_size=world_size, rank=rank, step=step, epoch=1, step_in_epoch=step,
                batch_num=1000, reason="periodic", kind="periodic", created=1.7e9 + step, names=["net"],
            )  # fmt: skip
            header = seal_header(HeaderDraft(entries).header(info, tree, record.json), digests)
            (folder / f"net-1_{step}.safetensors").write_bytes(header + bytes(entries[-1].end))


def judge(root: Path, world_size: int, newest: int) -> dict[str, float]:
    cpu_s, began = time.process_time(), time.perf_counter()
    listing = list_files([root])
    listed = time.perf_counter()
    findings = scan(listing, trust=reader_trust(root))
    read = time.perf_counter()
    inventory = Inventory.merge([findings])
    merged = time.perf_counter()
    plan = inventory.plan(World(world_size))
    ended = time.perf_counter()
    assert isinstance(plan, ResumePlan) and plan.step == newest, plan
    return {
        harness.SECONDS: ended - began,
        "list": listed - began,
        "read": read - listed,
        "merge": merged - read,
        "plan": ended - merged,
        "cpu": time.process_time() - cpu_s,
    }


def command(root: Path) -> float:
    began = time.perf_counter()
    told = subprocess.run(
        [sys.executable, "-m", "mindx_elastic", "plan", str(root), "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if told.returncode:
        raise RuntimeError(f"mindx-elastic plan ended with {told.returncode}: {told.stderr[-500:]}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
