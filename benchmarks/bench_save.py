"""Seconds from a signal to a durable checkpoint: mindx_elastic beside torch.save, DCP and safetensors.

    python benchmarks/bench_save.py [--gib 1] [--rounds 7] [--pause 0] [--directory DIR] [--ranks N] [--json FILE]

Each sample is a fresh process that builds the state (big and small tensors, as of a model with Adam), sends itself
SIGTERM, and saves as soon as the signal is heard. Its first save is *cold* (nothing of the save path has run or has
touched its memory), the following ones are *warm*. Time ends when the file and its directory are flushed, for
everybody: `torch.save` and `safetensors.save_file` are followed by fsync, DCP's writer runs with its `sync_files`.
mindx_elastic alone also computes digests meanwhile. Its way to the disk is measured once before, as a guard does it at
its start (--page-cache auto). `raw direct` is the limit of the disk: as many bytes, page-aligned
in memory already, written by O_DIRECT from four threads that also compute the digests, and flushed.

With --ranks N, N replicas in DDP with a state of that size each, on one disk, under torchrun: the time from the signal
to the moment at which the last rank is durable. Beside each other: full copies of all ranks, the state divided in two
copies (the default from 3 ranks on), and in one (`remove_redundancy=True`); besides, what a script would write that has
been told to stop at that moment: DCP, whose ranks divide replicated tensors too, and torch.save on rank 0. Each round
is a job for each, in turn.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

_LAYER_BYTES = 16 << 20
OURS, RAW = "mindx_elastic", "raw direct"
METHODS = (OURS, RAW, "torch.save", "dcp", "safetensors")
WAYS = {"full copies": "never", "two copies": "always", "one copy": "always"}
"""What N replicas write, and ``MINDX_DIVIDED_SAVES`` for it."""
PEERS = ("DCP", "torch.save, rank 0")
WARM_SAVES = 3
_MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--directory", type=Path, default=Path(), help="disk to write to (default: here)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each save (default 0)")
    parser.add_argument("--ranks", type=int, default=1, help="replicas that save together (default 1)")
    parser.add_argument("--page-cache", choices=("auto", "always", "never"), default="auto", help="for mindx_elastic")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", choices=(*WAYS, *PEERS), help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_measure(args.child, args.gib, args.directory, args.pause)))
        return 0
    if args.rank_of:
        _train_until_stopped(args.rank_of, args.gib, args.directory)
        return 0
    report = harness.Report(args, libraries=("safetensors", "xxhash"))
    os.environ["MINDX_PAGE_CACHE"] = way = choose_way(args.page_cache, args.directory)
    print(f"disk      {_file_system(args.directory)}; mindx_elastic uses the page cache: {way}")
    if args.ranks > 1:
        _compare_ways(args, report)
        return report.end()
    methods: dict[str, harness.Method] = {
        method: lambda method=method: _run_child(method, args.gib, args.directory, args.pause)  # type: ignore[misc]
        for method in METHODS
    }
    compared = harness.compare(f"{args.gib:g} GiB", methods, rounds=args.rounds)
    targets = []
    for kind in ("cold", "warm"):
        targets.append(harness.Target(method=OURS, figure=kind, times_as_fast=0.95))
        fastest = min(METHODS[2:], key=lambda method: compared.spread(method, kind).median)
        targets.append(harness.Target(method=OURS, figure=kind, times_as_fast=1.3, base=fastest))
    report.add(compared, base=RAW, targets=targets)
    return report.end()


def choose_way(setting: str, directory: Path) -> str:
    from mindx_elastic.doctor.places import measure

    if setting != "auto":
        return setting
    direct, cached = (measure(directory, 0.5, page_cache=way).bytes_per_s for way in (False, True))
    return "always" if cached > 1.1 * direct else "never"


def _run_child(method: str, gib: float, directory: Path, pause_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench_save-", dir=directory) as folder:
        command = [sys.executable, __file__, "--child", method, "--gib", str(gib), "--directory", folder]
        command += ["--pause", str(pause_s)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure(method: str, gib: float, directory: Path, pause_s: float) -> dict[str, float]:
    save = _SAVERS[method]()
    state = _make_state(int(gib * 1024) * _MIB)
    if method == RAW:
        save(state, directory)  # makes its aligned memory
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    seconds = []
    for number in range(1 + WARM_SAVES):
        time.sleep(pause_s)
        heard.clear()
        target = directory / f"save-{number}"
        start = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        while not heard:
            pass
        save(state, target)
        seconds.append(time.monotonic() - start)
        _remove(target, directory)
    return {"cold": seconds[0], "warm": statistics.median(seconds[1:])}


def _compare_ways(args: argparse.Namespace, report: harness.Report) -> None:
    def sample(way: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="bench_save-", dir=args.directory) as folder:
            seconds, nbytes = _stop_job(way, args.ranks, args.gib, Path(folder))
        return {harness.SECONDS: seconds, "bytes / state": nbytes / (args.gib * (1 << 30))}

    ways = [way for way in WAYS if way != "two copies" or args.ranks > 2] + list(PEERS)
    methods: dict[str, harness.Method] = {way: lambda way=way: sample(way) for way in ways}  # type: ignore[misc]
    compared = harness.compare(f"{args.ranks} ranks, {args.gib:g} GiB each", methods, rounds=args.rounds)
    targets = [
        harness.Target(method="one copy", times_as_fast=0.9 * args.ranks),
        harness.Target(method="one copy", figure="bytes / state", at_most=1.01),
    ]
    report.add(compared, base="full copies", targets=targets)


def _stop_job(way: str, ranks: int, gib: float, folder: Path) -> tuple[float, int]:
    """Seconds from the signal to the last durable file, and the bytes of all files."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--rank-of", way, "--gib", str(gib), "--directory", str(folder)]
    env = {**os.environ, "MINDX_DIVIDED_SAVES": WAYS.get(way, ""), "MINDX_ARENA_DIR": "none", "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    subprocess.run(command, env=env, check=False, stdout=quiet, stderr=quiet)  # it ends by the signal
    durable = [float(path.read_text()) for path in folder.glob("durable_*")]
    if not durable:
        lines = [json.loads(line) for line in (folder / "ckpt" / "events.jsonl").read_text().splitlines()]
        durable = [line["time"] for line in lines if line["event"] == "durable"]
    if len(durable) != ranks:
        raise SystemExit(f"{way}: {len(durable)} of {ranks} ranks are durable")
    sent = float((folder / "sent").read_text())
    files = [path for path in (folder / "ckpt").rglob("*") if path.stat().st_size >= _LAYER_BYTES]
    return max(durable) - sent, sum(path.stat().st_size for path in files)


def _train_until_stopped(way: str, gib: float, folder: Path) -> None:
    """One rank: `gib` of weights, frozen so that the step on the way to the stop moves none of them between the ranks;
    stopped after some steps."""
    import torch
    import torch.distributed as dist

    import mindx_elastic as mx

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = torch.nn.Linear(1, 1)
    for number in range(max(1, int(gib * (1 << 30)) // _LAYER_BYTES)):
        frozen = torch.nn.Parameter(torch.randn(_LAYER_BYTES // 4), requires_grad=False)
        network.register_parameter(f"frozen_{number}", frozen)
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9)
    if way in PEERS:
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "sent").write_text(repr(time.time()))
        _save_with_peer(way, {"model": network.state_dict(), "optimizer": optimizer.state_dict()}, folder / "ckpt")
        (folder / f"durable_{dist.get_rank()}").write_text(repr(time.time()))
        dist.destroy_process_group()
        return
    guard = mx.Guard(
        model=model, optimizer=optimizer, directory=folder / "ckpt", grace_s=300, remove_redundancy=way == "one copy"
    )
    with guard:
        for step in guard.steps(1000):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            guard.step_end()
            if step == 2:
                dist.barrier()
                if dist.get_rank() == 0:
                    (folder / "sent").write_text(repr(time.time()))
                    os.kill(os.getpid(), signal.SIGTERM)
                while guard.stopper.alarm is None:
                    time.sleep(0.001)
                guard.stopper.step_gate.wait_for_limit(60)


def _save_with_peer(peer: str, state: dict[str, Any], target: Path) -> None:
    """All ranks together, each until its part is flushed."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if peer == "DCP":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target, sync_files=True))
    elif dist.get_rank() == 0:
        target.mkdir()
        torch.save(state, target / "state.pt")
        _fsync(target / "state.pt")
    _fsync(target.parent)


def _make_state(nbytes: int) -> dict[str, Any]:
    """A model and its Adam moments: a third each, per layer one big matrix and a dozen small vectors."""
    import torch

    torch.manual_seed(0)
    width = 2048
    noise = torch.randn(4 * _MIB)
    num_layers = max(1, nbytes // 3 // (4 * width * (width + 12)))
    groups: dict[str, dict[str, Any]] = {}
    for group in ("model", "exp_avg", "exp_avg_sq"):
        tensors: dict[str, Any] = groups.setdefault(group, {})
        for layer in range(num_layers):
            tensors[f"layers.{layer}.weight"] = noise[: width * width].reshape(width, width) + layer
            for index in range(12):
                tensors[f"layers.{layer}.norm{index}"] = noise[:width] * layer + index
    rest = max(0, nbytes // 4 - sum(t.numel() for tensors in groups.values() for t in tensors.values()))
    groups["model"]["head.weight"] = noise.repeat(rest // noise.numel() + 1)[:rest].clone()
    return {"state": groups, "step": 1000}


def _remove(target: Path, directory: Path) -> None:
    """Give the disk back as it was, so that every save finds the same conditions."""
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    _fsync(directory)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mindx_elastic() -> Callable[[Any, Path], None]:
    from mindx_elastic.persist.format import CheckpointInfo
    from mindx_elastic.persist.writer import write_checkpoint

    def save(state: Any, target: Path) -> None:
        info = CheckpointInfo(
            run_id="bench",
            world_size=1,
            rank=0,
            step=1000,
            epoch=1,
            step_in_epoch=1000,
            batch_num=2000,
            reason="SIGTERM",
            kind="breakpoint",
            created=time.time(),
        )
        write_checkpoint(target, state, info, cached=os.environ.get("MINDX_PAGE_CACHE") == "always")

    return save


def _torch_save() -> Callable[[Any, Path], None]:
    import torch

    def save(state: Any, target: Path) -> None:
        with open(target, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _fsync(target.parent)

    return save


def _dcp() -> Callable[[Any, Path], None]:
    import warnings

    import torch.distributed.checkpoint as dcp

    def save(state: Any, target: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs on one process; it is meant to
            dcp.save(state, storage_writer=dcp.FileSystemWriter(target, sync_files=True))
        _fsync(target)
        _fsync(target.parent)

    return save


def _safetensors() -> Callable[[Any, Path], None]:
    from safetensors.torch import save_file

    def save(state: Any, target: Path) -> None:
        flat = {f"{group}.{name}": t for group, tensors in state["state"].items() for name, t in tensors.items()}
        save_file(flat, target)
        _fsync(target)
        _fsync(target.parent)

    return save


def _raw_direct() -> Callable[[Any, Path], None]:
    import xxhash

    block = 8 << 20
    aligned: list[mmap.mmap] = []

    def prepare(state: Any) -> mmap.mmap:
        nbytes = sum(tensor.nbytes for tensors in state["state"].values() for tensor in tensors.values())
        memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        place = 0
        for tensors in state["state"].values():
            for tensor in tensors.values():
                memory[place : place + tensor.nbytes] = tensor.reshape(-1).numpy().tobytes()
                place += tensor.nbytes
        return memory

    def save(state: Any, target: Path) -> None:
        if not aligned:  # before the clock runs
            aligned.append(prepare(state))
            return
        view = memoryview(aligned[0])
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, len(view))

        def write(start: int) -> None:
            piece = view[start : start + block]
            done = 0
            while done < len(piece):
                done += os.pwrite(fd, piece[done:], start + done)
            xxhash.xxh3_128_digest(piece)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(0, len(view), block)))
        os.fsync(fd)
        os.close(fd)
        _fsync(target.parent)

    return save


_SAVERS: dict[str, Callable[[], Callable[[Any, Path], None]]] = {
    OURS: _mindx_elastic,
    RAW: _raw_direct,
    "torch.save": _torch_save,
    "dcp": _dcp,
    "safetensors": _safetensors,
}


def _file_system(directory: Path) -> str:
    command = ["stat", "--file-system", "--format=%T", str(directory)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
