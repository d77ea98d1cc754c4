"""Puts defects back, one at a time: after how many schedules does the simulation find each?

    python -m tests.mutants.defects [--most 20000] [--only cluster]

Each of ``defects.jsonl`` is a change of a few lines that a good engineer could make, and most were made here once. The
table names after how many schedules it shows, and what is wrong then. Exit code 1: one was not found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.__main__ import copy_project

__all__ = ["Defect", "defects"]


@dataclass(frozen=True)
class Defect:
    """`old` stands once in `file`."""

    what: str
    simulation: str
    """The module of `tests.simulation` that is to find it."""
    file: str
    old: str
    new: str


def defects() -> list[Defect]:
    text = Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8")
    return [Defect(**json.loads(line)) for line in text.splitlines()]


def _schedules_until_found(root: Path, simulation: str, most: int) -> tuple[int, str]:
    """How many schedules it took, and what was found; 0: nothing."""
    command = [sys.executable, "-m", "tests.simulation", simulation, "--schedules", str(most), "--until-wrong"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(f"{simulation}, seed ")]
    if found:
        return int(found[0].split()[2].rstrip(":")) + 1, found[0].partition(": ")[2]
    return (1, done.stderr.strip().splitlines()[-1]) if done.returncode else (0, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=20_000, help="schedules for each")
    parser.add_argument("--only", default="", help="those of this simulation: stops, cluster, agents, in_place, files")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copy_project(Path(folder))
        for defect in (each for each in defects() if options.only in ("", each.simulation)):
            path = root / defect.file
            text = path.read_text(encoding="utf-8")
            if text.count(defect.old) != 1:
                print(f"| {defect.what} | its lines are not in {defect.file} any more | |", flush=True)
                missed += 1
                continue
            path.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
            took, found = _schedules_until_found(root, defect.simulation, options.most)
            path.write_text(text, encoding="utf-8")
            missed += not took
            print(f"| {defect.what} | {took or 'not found'} | {found[:120]} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
