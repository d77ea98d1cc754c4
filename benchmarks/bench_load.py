"""Seconds to load a checkpoint into memory: mindx_elastic beside a raw read of the same file, torch.load, DCP and
safetensors.

    python benchmarks/bench_load.py [--gib 1] [--rounds 7] [--ranks 4,2] [--directory DIR] [--json FILE] [--plot FILE]

Each sample is a fresh process that has the state in new memory in the end, every byte of it. The file is *cold* (the
kernel has been told to forget it, and a look makes sure that it did) or *warm* (it was read a moment ago). Shared
memory: the same in /dev/shm, where snapshots are, which are read by the same function.

* mindx_elastic: `read_checkpoint`, which checks the digest of each tensor
* raw read: four threads read the file by `preadv` into new memory, 8 MiB at a time; nothing is checked. Of a warm file
  that is a memcpy from the page cache. raw read, hashed: with the digest of each of these pieces besides
* torch.load, and with mmap=True; DCP into a state of zeros; safetensors. What maps the file is copied then, as a
  program would that trains on

With --ranks 4,2 instead: 2 ranks load a state that FSDP2 had divided among 4, from a warm disk; DCP beside it, and a
raw read of as many bytes by 2 processes. Seconds of the slowest rank, from the call to the loaded state, and CPU
seconds of all ranks. Ours is the guard's whole entering: planning, meetings of the ranks, the digests of all files, and
the loading into model and optimizer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
from bench_save import _dcp, _make_state, _mindx_elastic, _safetensors, _torch_save

RAW, HASHED, OURS = "raw read", "raw read, hashed", "mindx_elastic"
READERS = (OURS, RAW, HASHED, "torch.load", "torch.load, mmap", "dcp", "safetensors")
FILES = {OURS: "ours", RAW: "ours", HASHED: "ours", "torch.load, mmap": "torch.load"}
"""Whose file a reader reads, where it is not its own."""
_PIECE = 8 << 20
_MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--directory", type=Path, default=Path(), help="disk to read from (default: here)")
    parser.add_argument("--ranks", default="", help="of an FSDP2 state: that have saved it, and that load it (4,2)")
    parser.add_argument("--child", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--job", nargs=3, metavar=("METHOD", "FOLDER", "WHAT"), help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.directory)))
        return 0
    if args.job:
        run_rank(args.job[0], Path(args.job[1]), args.job[2], args.gib)
        return 0
    report = harness.Report(args, libraries=("safetensors", "xxhash"))
    with tempfile.TemporaryDirectory(prefix="bench_load-", dir=args.directory) as name:
        folder = Path(name)
        targets = [harness.Target(method=OURS, times_as_fast=0.9)]
        if args.ranks:
            old, new = map(int, args.ranks.split(","))
            methods = resharded(folder, old, new, args.gib)
            compared = harness.compare(
                f"{args.gib:g} GiB of FSDP2, {old} -> {new} ranks, warm", methods, rounds=args.rounds
            )
            report.add(compared, base=RAW, targets=targets)
            return report.end()
        write_files(folder, args.gib)
        for kind in ("cold", "warm"):
            methods = {reader: _sample(reader, folder, cold=kind == "cold") for reader in READERS}
            compared = harness.compare(f"{args.gib:g} GiB, {kind}", methods, rounds=args.rounds)
            report.add(compared, base=RAW, targets=targets)
    with tempfile.TemporaryDirectory(prefix="bench_load-", dir="/dev/shm") as name:
        folder = Path(name)
        _mindx_elastic()(_make_state(int(args.gib * 1024) * _MIB), folder / "ours")
        methods = {reader: _sample(reader, folder, cold=False) for reader in (OURS, RAW, HASHED)}
        compared = harness.compare(f"{args.gib:g} GiB, shared memory", methods, rounds=args.rounds)
        report.add(compared, base=RAW, targets=targets)
    return report.end()


def write_files(folder: Path, gib: float) -> None:
    state = _make_state(int(gib * 1024) * _MIB)
    savers = {"ours": _mindx_elastic(), "torch.load": _torch_save(), "dcp": _dcp(), "safetensors": _safetensors()}
    for name, save in savers.items():
        save(state, folder / name)


def _sample(reader: str, folder: Path, *, cold: bool) -> harness.Method:
    path = folder / FILES.get(reader, "ours" if reader == OURS else reader)
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]

    def sample() -> dict[str, float]:
        for each in files:
            forget(each) if cold else each.read_bytes()
        command = [sys.executable, __file__, "--child", reader, "--directory", str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures

    return sample


def forget(path: Path) -> None:
    """Have the kernel drop the file from its page cache. Raises SystemExit where it did not."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        for _ in range(20):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not _pages_in_cache(fd):
                return
            time.sleep(0.05)
    finally:
        os.close(fd)
    raise SystemExit(f"{path} stays in the page cache: no cold read can be measured here")


def _pages_in_cache(fd: int) -> int:
    """mincore(2). A read without waiting would tell it as well, and bring the pages in."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    found = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE) as mapped:  # private and writable: ctypes takes no other
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(each & 1 for each in found)


# --- one process, one load --------------------------------------------------------------------------------------------


class Timed:
    """What something takes from here on."""

    def __init__(self) -> None:
        self._began, self._cpu = time.monotonic(), time.process_time()

    def figures(self) -> dict[str, float]:
        return {"seconds": time.monotonic() - self._began, "cpu": time.process_time() - self._cpu}


def measure(reader: str, path: Path) -> dict[str, float]:
    load = _LOADERS[reader]()
    timed = Timed()
    found = load(path)
    figures = timed.figures()
    del found
    return figures


def _ours() -> Callable[[Path], Any]:
    from mindx_elastic.persist.reader import read_checkpoint

    return read_checkpoint


def _raw(*, hashed: bool) -> Callable[[Path], Any]:
    import torch
    import xxhash

    def load(path: Path) -> Any:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        memory = torch.empty(size, dtype=torch.uint8)
        view = memory.numpy().data

        def read(start: int) -> None:
            stop = min(size, start + _PIECE)
            done = start
            while done < stop:
                done += os.preadv(fd, [view[done:stop]], done)
            if hashed:
                xxhash.xxh3_128_digest(view[start:stop])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(0, size, _PIECE)))
        os.close(fd)
        return memory

    return load


def _torch_load(*, maps: bool) -> Callable[[Path], Any]:
    import torch

    def load(path: Path) -> Any:
        state = torch.load(path, mmap=maps)
        return {name: each.clone() for name, each in _tensors(state["state"])} if maps else state

    return load


def _tensors(groups: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            yield f"{group}.{name}", tensor


def _dcp_load() -> Callable[[Path], Any]:
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    def load(path: Path) -> Any:
        reader = dcp.FileSystemReader(path)
        about = reader.read_metadata().state_dict_metadata
        state = {key: torch.zeros(each.size) for key, each in about.items() if hasattr(each, "size")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs on one process; it is meant to
            dcp.load(state, storage_reader=reader)
        return state

    return load


def _safetensors_load() -> Callable[[Path], Any]:
    from safetensors.torch import load_file

    def load(path: Path) -> Any:
        return {name: each.clone() for name, each in load_file(path).items()}

    return load


_LOADERS: dict[str, Callable[[], Callable[[Path], Any]]] = {
    OURS: _ours,
    RAW: lambda: _raw(hashed=False),
    HASHED: lambda: _raw(hashed=True),
    "torch.load": lambda: _torch_load(maps=False),
    "torch.load, mmap": lambda: _torch_load(maps=True),
    "dcp": _dcp_load,
    "safetensors": _safetensors_load,
}


# --- a state that ranks have divided, loaded by another number of ranks -----------------------------------------------


def resharded(folder: Path, old: int, new: int, gib: float) -> dict[str, harness.Method]:
    launch(old, "ours", folder, "save", gib)
    launch(old, "dcp", folder, "save", gib)
    return {
        OURS: lambda: launch(new, "ours", folder, "load", gib),
        RAW: lambda: launch(new, "raw", folder, "load", gib),
        "dcp": lambda: launch(new, "dcp", folder, "load", gib),
    }


def launch(ranks: int, method: str, folder: Path, what: str, gib: float) -> dict[str, float]:
    """Seconds of the slowest rank, and CPU seconds of all."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--job", method, str(folder), what, "--gib", str(gib)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MINDX_ARENA_DIR": "none"}
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != ranks:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"{method}, {what}: exit code {done.returncode}, {len(found)} of {ranks} ranks have ended")
    return {"seconds": max(each["seconds"] for each in found), "cpu": sum(each["cpu"] for each in found)}


def run_rank(method: str, folder: Path, what: str, gib: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    timed = read_share(folder / "ours") if method == "raw" else _JOBS[method](folder / method, what, gib)
    sys.stdout.write(f"{json.dumps(timed)}\n")  # in one piece: torchrun unbuffers its workers, which share the pipe
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def make_sharded(gib: float) -> tuple[Any, Any]:
    """A model that FSDP2 has divided, and Adam, `gib` together."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    width = 1024
    blocks = max(1, int(gib * (1 << 30)) // 12 // (width * (width + 1)))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    import torch

    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def ours_of_rank(folder: Path, what: str, gib: float) -> dict[str, float]:
    import mindx_elastic as mx

    model, optimizer = make_sharded(gib)
    guard = mx.Guard(model=model, optimizer=optimizer, directory=folder, final_save=what == "save")  # imports, too
    timed = Timed()
    with guard:
        figures = timed.figures()
        if what == "save":
            step(model, optimizer)
            guard.step_end()
        elif guard.position.step != 1:
            raise SystemExit(f"step {guard.position.step} instead of 1 was loaded")
    return figures


def dcp_of_rank(folder: Path, what: str, gib: float) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = make_sharded(gib)
    if what == "save":
        step(model, optimizer)
    timed = Timed()
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if what == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return timed.figures()


def read_share(folder: Path) -> dict[str, float]:
    """Read every n-th file of a step into new memory."""
    import torch
    import torch.distributed as dist

    rank, count = dist.get_rank(), dist.get_world_size()
    files = sorted(each for each in folder.rglob("*") if each.is_file() and each.stat().st_size > _MIB)
    dist.barrier()
    timed = Timed()
    for path in files[rank::count]:
        memory = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with open(path, "rb", buffering=0) as file:
            file.readinto(memory.numpy().data)
    return timed.figures()


_JOBS = {"ours": ours_of_rank, "dcp": dcp_of_rank}

if __name__ == "__main__":
    sys.exit(main())
