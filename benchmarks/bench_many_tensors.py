"""Seconds to save and to load a state of many small tensors, beside one tensor of the same size and other libraries.

    python benchmarks/bench_many_tensors.py [--tensors 20000] [--kib 4] [--rounds 7] [--directory DIR] [--json FILE]

`seconds` is the wall clock, until file and directory are flushed for everybody; `cpu` is the process's CPU time, which
says more on a busy machine. mindx_elastic computes digests when it saves, and checks them when it loads. `least` is
what no program in Python and torch can leave out for tensors that are checked one by one, without any file: the memory
is hashed and copied tensor by tensor, and each tensor that is loaded has memory of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

import harness
from bench_save import _mindx_elastic, _safetensors, _torch_save
from mindx_elastic.persist.reader import read_checkpoint

BLOCK_BYTES = 4 << 20
ONE = "mindx_elastic, one tensor"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--kib", type=int, default=4, help="size of each tensor (default 4)")
    parser.add_argument("--directory", type=Path, default=Path(), help="disk to write to (default: here)")
    harness.add_arguments(parser)
    args = parser.parse_args()
    report = harness.Report(args)
    with tempfile.TemporaryDirectory(prefix="bench_many-", dir=args.directory) as name:
        folder = Path(name)
        saves, loads = methods(folder, args.tensors, args.kib)
        target = harness.Target(method="mindx_elastic", times_as_long=1.3)
        size = f"{args.tensors} tensors of {args.kib} KiB"
        for what, all_ in (("save", saves), ("load", loads)):
            compared = harness.compare(f"{what} {size}", all_, rounds=args.rounds, warm_up=1)
            report.add(compared, base=ONE, targets=[target], scale=1e3, unit="ms")
    return report.end()


def methods(folder: Path, count: int, kib: int) -> tuple[dict[str, harness.Method], dict[str, harness.Method]]:
    whole = torch.randn(count * kib << 8)
    small = {f"layers.{index}.weight": part.clone() for index, part in enumerate(whole.split(kib << 8))}
    savers: dict[str, tuple[Callable[[Any, Path], None], Any, Callable[[Path], Any]]] = {
        ONE: (_mindx_elastic(), {"state": {"model": {"weight": whole}}}, read_checkpoint),
        "mindx_elastic": (_mindx_elastic(), {"state": {"model": small}}, read_checkpoint),
        "torch.save": (_torch_save(), {"state": {"model": small}}, torch.load),
        "safetensors": (_safetensors(), {"state": {"model": small}}, load_file),
    }
    saves: dict[str, harness.Method] = {}
    loads: dict[str, harness.Method] = {}
    for name, (save, state, load) in savers.items():
        path = folder / name.replace(" ", "_")
        saves[name] = lambda save=save, state=state, path=path: timed(lambda: save(state, path), fresh=path)  # type: ignore[misc]
        loads[name] = lambda load=load, path=path: timed(lambda: load(path))  # type: ignore[misc]
    saves["least"] = lambda: timed(lambda: least_save(small))
    loads["least"] = lambda: timed(lambda: least_load(whole, kib << 8))
    return saves, loads


def least_save(tensors: dict[str, torch.Tensor]) -> str:
    """Copy and hash each tensor, and name each with its digest in one JSON text."""
    block = bytearray(BLOCK_BYTES)
    begin, address = memoryview(block), ctypes.addressof(ctypes.c_char.from_buffer(block))
    digests: dict[str, str] = {}
    fill = 0
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes
        if fill + nbytes > BLOCK_BYTES:
            fill = 0
        ctypes.memmove(address + fill, tensor.data_ptr(), nbytes)
        digests[name] = xxhash.xxh3_128_hexdigest(begin[fill : fill + nbytes])
        fill += nbytes
    return json.dumps(digests)


def least_load(whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Hash each part of some memory, and copy the parts apart."""
    found: list[torch.Tensor] = []
    for run in whole.split(64 * size):
        view = run.numpy().data.cast("B")
        for start in range(0, len(view), 4 * size):
            xxhash.xxh3_128_hexdigest(view[start : start + 4 * size])
        cut: Any = torch.split_with_sizes_copy  # torch's own stub says that it returns nothing
        found += cut(run, [size] * (len(run) // size))
    return found


def timed(work: Callable[[], object], *, fresh: Path | None = None) -> dict[str, float]:
    if fresh is not None and fresh.exists():
        os.unlink(fresh)
    wall, cpu = time.monotonic(), time.process_time()
    found = work()
    figures = {"seconds": time.monotonic() - wall, "cpu": time.process_time() - cpu}
    del found
    return figures


if __name__ == "__main__":
    sys.exit(main())
