"""What a guard costs a script until its first step: its imports, entering it in a new job, and in one that resumes.

    python benchmarks/bench_enter.py [--ranks 1,4] [--rounds 7] [--json FILE] [--plot FILE]

ResNet-20 with SGD and a `ResumableLoader`, in DDP over gloo where there are several ranks, one thread a rank; each
sample is a new job under torchrun. The script has made all of its own objects before the clock is read, so what torch
itself imports for an optimizer and for DDP is not in it. Its state is about 3 MiB: what is measured is all that is not
the reading of bytes.

* import: `mindx_elastic.Guard` is imported
* enter: `Guard` is made and entered; the slowest rank. `cpu` is the CPU time of the slowest rank's process meanwhile
* resume: the same where a checkpoint lies on the disk, which is found, planned, read and loaded
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

KINDS = ("enter", "resume")
TARGETS_S = {"import": 0.05, "enter": 0.05, "resume": 0.15}
ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,4", help="numbers of ranks, comma between them (default 1,4)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(enter(args.child)), flush=True)
        return 0
    report = harness.Report(args)
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory(prefix="bench_enter-") as name:
            folder = Path(name)
            launch(ranks, folder / "saved")  # leaves the checkpoint that is resumed
            methods: dict[str, harness.Method] = {
                "enter": lambda folder=folder, ranks=ranks: launch(ranks, Path(tempfile.mkdtemp(dir=folder))),  # type: ignore[misc]
                "resume": lambda folder=folder, ranks=ranks: launch(ranks, folder / "saved"),  # type: ignore[misc]
            }
            compared = harness.compare(f"ranks: {ranks}", methods, rounds=args.rounds)
        targets = [harness.Target(method=kind, at_most=TARGETS_S[kind]) for kind in KINDS]
        targets.append(harness.Target(method="enter", figure="import", at_most=TARGETS_S["import"]))
        report.add(compared, targets=targets, scale=1e3, unit="ms")
    return report.end()


def launch(ranks: int, folder: Path) -> dict[str, float]:
    """Each figure of the slowest rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # as it is with users
    done = subprocess.run([*command, "--child", str(folder)], env=env, check=False, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != ranks:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"exit code {done.returncode}; {len(found)} of {ranks} ranks have told their figures")
    return {name: max(each[name] for each in found) for name in found[0]}


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
