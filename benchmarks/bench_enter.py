"""What a guard costs a script besides its steps: imports, entering, leaving, memory; also beside the script without it.

    python benchmarks/bench_enter.py [--cases small,layers,ddp,run] [--beside CHECKOUT] [--ranks 1,4] [--rounds 7] ...

One thread a process. Each sample is a new process, or a new job under torchrun; `--beside` measures another checkout of
this project in the same rounds, as "before". CPU time is that of whole processes, by the kernel's account.

`small`: the README's program, 60 steps, beside itself without a guard.

* cpu: seconds of the process; memory: its peak in MiB
* import: CPU seconds until `mindx_elastic.Guard` is there; enter: of making and entering it, in an empty directory
* reserved: MiB for a save of the dying process, less 1 KiB a parameter

`layers`: 5,000 linear layers, with SGD; cpu and memory as above.

* steps: CPU seconds of 10 steps; enter and leave: of the rest of the guard

`ddp`: ResNet-20 with SGD and a `ResumableLoader`, in DDP over gloo where there are several ranks. The script has made
all of its own objects before the clock is read, so what torch itself imports for an optimizer and for DDP is not in it.
Its state is about 3 MiB: what is measured is all that is not the reading of bytes.

* import: `mindx_elastic.Guard` is imported
* enter: `Guard` is made and entered; the slowest rank. `cpu` is the CPU time of the slowest rank's process meanwhile
* resume: the same where a checkpoint lies on the disk, which is found, planned, read and loaded

`run`: a script of one line under ``mindx-elastic run`` and under torchrun, one process each.

* seconds: until its line; cpu: of the launcher and the script, to their end
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import harness

KINDS = ("enter", "resume")
TARGETS_S = {"import": 0.05, "enter": 0.05, "resume": 0.15}
TARGETS = {
    "small": (
        harness.Target(method="now", figure="cpu", times_as_long=1.04),
        harness.Target(method="now", figure="memory", at_most_more=12.0),
        harness.Target(method="now", figure="enter", at_most=0.02, base="now"),
        harness.Target(method="now", figure="reserved", at_most=8.0, base="now"),
    ),
    "layers": (
        harness.Target(method="now", figure="steps", times_as_long=1.06),
        harness.Target(method="now", figure="enter and leave", at_most=0.6, base="now"),
        harness.Target(method="now", figure="memory", at_most_more=40.0),
    ),
}
NUM_LAYERS, NUM_STEPS = 5000, 10
ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="small,layers,ddp,run", help="comma between them (default all)")
    parser.add_argument("--beside", type=Path, help="another checkout of this project, to compare with")
    parser.add_argument("--ranks", default="1,4", help="of ddp: numbers of ranks, comma between them (default 1,4)")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        case, folder = args.child
        figures = {"ddp": enter, "small": small_program, "layers": many_layers}[case](Path(folder))
        (Path(folder) / f"figures-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(figures))
        return 0
    trees = {"now": ROOT} | ({} if args.beside is None else {"before": args.beside.absolute()})
    report = harness.Report(args)
    methods: dict[str, harness.Method]
    for case in args.cases.split(","):
        if case == "ddp":
            for ranks in map(int, args.ranks.split(",")):
                compare_ranks(report, trees, ranks, args.rounds)
            continue
        if case == "run":
            methods = {"torchrun": partial(first_line, ["torch.distributed.run"])}
            methods["now"] = partial(first_line, ["mindx_elastic", "run"])
            compared = harness.compare(case, methods, rounds=args.rounds)
            targets = [harness.Target(method="now", figure=f, times_as_long=1.0) for f in (harness.SECONDS, "cpu")]
            report.add(compared, base="torchrun", targets=targets, unit="s")
            continue
        methods = {"bare": partial(launch, case, ROOT, is_bare=True)}
        methods |= {name: partial(launch, case, tree) for name, tree in trees.items()}
        compared = harness.compare(case, methods, rounds=args.rounds)
        report.add(compared, base="bare", targets=TARGETS[case], unit="s, MiB")
        if args.beside:
            report.add(compared, base="before", unit="s, MiB")
    return report.end()


def compare_ranks(report: harness.Report, trees: dict[str, Path], ranks: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench_enter-") as name:
        methods: dict[str, harness.Method] = {}
        for kind, tree in trees.items():
            saved = Path(name) / kind
            run = partial(launch, "ddp", tree, ranks=ranks)
            run(folder=saved)  # leaves the checkpoint that is resumed
            before = "" if kind == "now" else f"{kind}: "
            methods |= {f"{before}enter": run, f"{before}resume": partial(run, folder=saved)}
        compared = harness.compare(f"ranks: {ranks}", methods, rounds=rounds)
    targets = [harness.Target(method=kind, at_most=TARGETS_S[kind]) for kind in KINDS]
    targets.append(harness.Target(method="enter", figure="import", at_most=TARGETS_S["import"]))
    report.add(compared, targets=targets, scale=1e3, unit="ms")


def launch(
    case: str, tree: Path, *, is_bare: bool = False, ranks: int = 0, folder: Path | None = None
) -> dict[str, float]:
    """Run the case with the package in `tree`: each figure of the slowest rank. `ranks`: under torchrun; 0: a plain
    process. `folder`: to be used again; None: a new one."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # as it is with users
    env |= {"BARE": "1"} if is_bare else {}
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_enter-")))
        place.mkdir(exist_ok=True)
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen([*command, __file__, "--child", case, str(place)], env=env, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        found = [json.loads(path.read_text()) for path in place.glob("figures-*.json")]
        if process.returncode or len(found) != max(1, ranks):
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise SystemExit(f"exit code {process.returncode}; {len(found)} ranks have told their figures")
    whole = {} if ranks else {"cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss / 1024}
    return whole | {name: max(each[name] for each in found) for name in found[0]}


def first_line(launcher: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench_enter-") as folder:
        script = Path(folder) / "hello.py"
        script.write_text("print('hello', flush=True)")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        began = time.monotonic()
        command = [sys.executable, "-m", *launcher, "--nproc-per-node", "1", str(script)]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        while b"hello" not in (line := process.stdout.readline()):
            assert line, "the launcher has ended without the script's line"
        seconds = time.monotonic() - began
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
    return {harness.SECONDS: seconds, "cpu": used.ru_utime + used.ru_stime}


def small_program(folder: Path) -> dict[str, float]:
    """The README's."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(640, 20), torch.randint(0, 2, (640,)))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        sched.step()
        return loss

    if os.environ.get("BARE"):
        for _ in range(3):
            for x, y in loader:
                step(x, y)
        return {}
    began = time.process_time()
    import mindx_elastic as mx

    make = mx.Guard
    imported = time.process_time()
    guard = make(
        model=model, optimizer=opt, lr_scheduler=sched, loader=loader, directory=folder, prefix="mlp", save_every="1h"
    )
    with guard:
        entered = time.process_time()
        for _ in guard.epochs(3):
            for x, y in loader:
                guard.step_end(loss=step(x, y))
        return {"import": imported - began, "enter": entered - imported, "reserved": reserved_mib(guard)}


def reserved_mib(guard: Any) -> float:
    """Without what there is for each parameter; of the ring the pages that it has."""
    reserve = guard._saver.reserve
    start = f"{reserve.take().data_ptr():x}-"  # waits until its pages are there
    reserve.give_back()
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8")
    pages_kib = int(mappings[mappings.index(f"\n{start}") :].partition("\nRss:")[2].split()[0])
    rooms: int = sum(map(len, reserve._rooms))
    return pages_kib / 1024 + rooms / (1 << 20) - len(guard._saver.collector.parameters) / 1024


def many_layers(folder: Path) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(NUM_LAYERS))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 4)

    def steps(numbers: Iterable[int], end: Callable[[], object]) -> float:
        began = time.process_time()
        for _ in numbers:
            opt.zero_grad()
            torch.stack([layer(x).sum() for layer in model]).sum().backward()
            opt.step()
            end()
        return time.process_time() - began

    if os.environ.get("BARE"):
        return {"steps": steps(range(NUM_STEPS), lambda: None)}
    import mindx_elastic as mx

    make = mx.Guard
    began = time.process_time()
    with make(model=model, optimizer=opt, directory=folder) as guard:
        took = steps(guard.steps(NUM_STEPS), guard.step_end)
    return {"steps": took, "enter and leave": time.process_time() - began - took}


def enter(folder: Path) -> dict[str, float]:
    """One rank: seconds. It does one step more than it finds, and keeps it only where it has found none."""
    import torch
    import torch.distributed as dist
    from torch import nn

    sys.path.insert(0, str(ROOT / "examples" / "resnet_cifar10"))
    from resnet import ResNet20

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    several = dist.get_world_size() > 1
    model: nn.Module = nn.parallel.DistributedDataParallel(ResNet20()) if several else ResNet20()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))
    nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1])).backward()
    optimizer.zero_grad()

    began = time.monotonic()
    import mindx_elastic as mx

    _ = mx.Guard
    imported = time.monotonic()
    loader = mx.data.ResumableLoader(data, batch_size=8, shuffle=True, seed=0)
    is_saved = any(folder.rglob("*.safetensors"))
    dist.barrier()
    entered, cpu = time.monotonic(), time.process_time()
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=folder, final_save=not is_saved)
    with guard:
        figures = {"seconds": time.monotonic() - entered, "cpu": time.process_time() - cpu}
        if guard.position.step != int(is_saved):
            raise SystemExit(f"the job is at step {guard.position.step}, and {int(is_saved)} was meant")
        for pictures, labels in loader:
            nn.functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step_end()
            break
    dist.destroy_process_group()
    return {**figures, "import": imported - began}


if __name__ == "__main__":
    sys.exit(main())
