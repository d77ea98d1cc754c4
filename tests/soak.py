"""Twenty thousand steps under the agent, with snapshots and periodic saves: does anything grow?

    python -m tests.soak [--marks 2000 10000 20000] [--ranks 2] [--every 2]

At each mark the job stands still, and memory, threads, descriptors, shared memory and the sizes of all files that the
job appends to are read. From the second mark on nothing may grow: the first one gives caches time to fill. Logs may
grow to their bound, which `--every 2` makes them reach.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from mindx_elastic.core.events import GENERATION_BYTES
from tests.harness import children, start_agent, unignore_signals

MEMORY_GROWTH_KIB = 8192
"""Of one process between the second mark and the last: allocators, not steps. 10,000 steps that each lost 1 KiB would
be 10 MiB."""
LOGS = ("events.jsonl", "events.jsonl.1")


def read_process(pid: int) -> dict[str, int]:
    """Memory, threads and descriptors of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def read_folders(memory: Path, *folders: Path) -> dict[str, int]:
    """Files and bytes in shared memory; files below the others, and the sizes of what is appended to."""
    shared = [path.stat() for path in memory.rglob("*") if path.is_file()]
    found = {"shm_files": len(shared), "shm_kib": sum(each.st_blocks for each in shared) // 2}
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    found["files"] = sum(path.name not in LOGS for path in files)
    for path in files:
        if path.suffix in (".jsonl", ".1", ".log") or path.name in LOGS:
            name = f"{path.parent.name}/{path.name}"
            found[name] = path.stat().st_size
    return found


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, dict[str, int]]]:
    memory = Path(tempfile.mkdtemp(prefix="mindx-soak-", dir="/dev/shm"))
    checkpoints, run_dir, go = folder / "checkpoints", folder / "run", folder / "go"
    go.mkdir()
    rows = []
    try:
        with start_agent(
            "soaked.py", checkpoints, "--go", go, "--every", args.every, "--marks", *args.marks,
            ranks=args.ranks, options=["--snapshot-every", "1"], env={"MINDX_ARENA_DIR": str(memory)},
            run_dir=run_dir,
        ) as job:  # fmt: skip
            for mark in args.marks:
                for rank in range(args.ranks):
                    job.wait_for(f"MARK {rank} {mark}")
                time.sleep(args.settle)
                pids = {"agent": job.process.pid, **{f"rank {rank}": job.pids()[rank] for rank in range(args.ranks)}}
                row = {name: read_process(pid) for name, pid in pids.items()}
                row["zygotes and others"] = {"processes": len(children(job.process.pid))}
                row["folders"] = read_folders(memory, checkpoints, run_dir)
                rows.append(row)
                print(json.dumps({"step": mark, **row}), flush=True)
                (go / str(mark)).touch()
            job.wait()
            assert len(job.matches("DONE")) == args.ranks, job.report()
        left = [str(path) for path in memory.rglob("*") if path.is_file()]
        assert not left, f"left in shared memory: {left}"
    finally:
        for path in sorted(memory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        memory.rmdir()
    return rows


def grown(rows: list[dict[str, dict[str, int]]]) -> list[str]:
    """What is larger at the last mark than at the second one, or over its bound."""
    found = []
    for who, last in rows[-1].items():
        for what, value in last.items():
            before = rows[1 if len(rows) > 2 else 0][who].get(what, 0)
            if what.endswith((".jsonl", ".1", ".log")):
                if "events" in what and value > GENERATION_BYTES + (1 << 16):
                    found.append(f"{who}: {what} has {value} bytes")
            elif value > before + (MEMORY_GROWTH_KIB if what == "rss_kib" else 0):
                found.append(f"{who}: {what} was {before} and is {value}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--marks", type=int, nargs="+", default=[2000, 10000, 20000])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=2, help="steps between two periodic saves")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds at a mark, for saves that still go on")
    args = parser.parse_args()
    unignore_signals()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    bad = grown(rows)
    print(f"{args.marks[-1]} steps on {args.ranks} ranks in {time.monotonic() - began:.0f} s", *bad, sep="\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
