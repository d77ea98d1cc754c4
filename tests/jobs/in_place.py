"""A training under ``mindx-elastic run``, mostly with ``--recover in-place``, with faults at given places.

``--fault RANK:STEP:WHERE[:WHAT]``, as often as wanted: the process of RANK does WHAT when it has come to WHERE in the
step: start, worker (the start of a loader worker), forward, mid, backward, update, after, eval, save; inside, where a
form of ``programs.py`` has it. WHAT is ``kill``, ``stop``, ``spin``, ``raise``, ``term``, or it kills its agent
(``agent``), and then itself (``node``), or the next rank, and goes on when that has a new process (``next``), or at
once (``next-now``). A loader worker kills its rank, or itself (``loader``). Each fires once in a job, however often the
step is done; ``FAULT rank step where`` says so.

Prints ``READY rank pid resumed_from``, ``SEEN epoch index,... rank step`` where a step begins (again where it is done
again), and ``DONE rank sha256 step``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import mindx_elastic as mx
from mindx_elastic.guard import saver as saving_module
from tests.jobs.kit import Every, say
from tests.jobs.loop import Pictures

PLACES = ("start", "worker", "inside", "forward", "mid", "backward", "update", "after", "eval", "save")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--compile", choices=("no", "model", "ddp", "loss", "step"), default="no")
    parser.add_argument("--shard", choices=("no", "fsdp", "zero"), default="no", help="zero: of the optimizer alone")
    parser.add_argument("--evaluate", choices=("no", "no_grad", "inference", "ddp"), default="no")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-beside", action="store_true", help="periodic saves are asynchronous")
    parser.add_argument(
        "--inside", choices=("no", "hooks", "count"), default="no", help="what the function does at its beginning"
    )
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--setup", choices=("no", "gather", "barrier", "group"), default="no")
    parser.add_argument("--with-guard", action="store_true", help="with guard: in place of guard.run()")
    parser.add_argument("--compress", action="store_true", help="a communication hook of DDP")
    parser.add_argument("--megabytes", type=int, default=0)
    parser.add_argument("--flag-file", action="store_true", help="watch graceful_exit.json in the folder")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, default=-1, help="after this step, until there is a file go")
    parser.add_argument("--late-rank", action="store_true", help="ask for the rank only when the model is built")
    parser.add_argument("--resources", action="store_true", help="RESOURCES rank step threads fds kB files")
    return parser


class Faults:
    """What happens, where and when. A file each in the job's folder says that it has happened."""

    def __init__(self, orders: Sequence[str], rank: int, directory: Path) -> None:
        self._folder, self._rank = directory / "faults", rank
        self._folder.mkdir(parents=True, exist_ok=True)
        self._orders: dict[tuple[int, str], str] = {}
        (self._folder / f"process-{rank}-{os.getpid()}").touch()
        for order in orders:
            victim, step, where, *what = order.split(":")
            assert where in PLACES
            if int(victim) == rank:
                self._orders[int(step), where] = what[0] if what else "kill"

    def at(self, step: int, where: str) -> None:
        what = self._orders.get((step, where))
        if what is None or not self._claim(f"{self._rank}-{step}-{where}"):
            return
        say(f"FAULT {self._rank} {step} {where}")
        if what.startswith("next"):
            self._kill_next(waits=what == "next")
        elif where == "worker":
            os.kill(os.getpid() if what == "loader" else os.getppid(), signal.SIGKILL)
        else:
            self.do(what)

    def watch_saves(self) -> None:
        """Faults at ``save``."""
        write = getattr(saving_module, "write_checkpoint")  # noqa: B009

        def write_or_die(path: Any, state: Any, info: Any, **named: Any) -> Any:
            self.at(info.step, "save")
            return write(path, state, info, **named)

        mock.patch.object(saving_module, "write_checkpoint", write_or_die).start()

    def _kill_next(self, *, waits: bool) -> None:
        """SIGKILL for the next rank. `waits`: until another process stands in for it."""
        name = f"process-{(self._rank + 1) % int(os.environ['WORLD_SIZE'])}-*"
        known = list(self._folder.glob(name))
        os.kill(max(int(path.name.rpartition("-")[2]) for path in known if _lives(path)), signal.SIGKILL)
        end = time.monotonic() + 100.0
        while waits and len(list(self._folder.glob(name))) == len(known) and time.monotonic() < end:
            time.sleep(0.001)

    def _claim(self, name: str) -> bool:
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @staticmethod
    def do(what: str) -> None:
        if what in ("kill", "stop", "term"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[what])
        elif what in ("agent", "node"):
            os.kill(int(os.environ["MINDX_AGENT_PID"]), signal.SIGKILL)
            if what == "node":
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "raise":
            raise ValueError("injected")
        elif what == "spin":
            while True:
                pass


def _lives(path: Path) -> bool:
    return Path("/proc", path.name.rpartition("-")[2]).exists()


class Training:
    """One rank's objects, and the parts of its step."""

    device = "cpu"
    faults: Faults

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.count, self.number = args, 0, 0
        self.meet()
        torch.manual_seed(0)
        self.network = self.make_network()
        self.criterion: Any = nn.functional.cross_entropy
        self.ddp = self.wrap(self.network)
        self.network[0].register_full_backward_hook(lambda *_: self.faults.at(self.step, "mid"))
        self.optimizer = self.make_optimizer()
        self.compiled_step: Any = None
        if args.compile == "loss":
            self.criterion = torch.compile(self.criterion, backend="aot_eager")
        if args.compile == "step":
            self.compiled_step = torch.compile(self.optimizer.step, backend="aot_eager")
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.scaler = torch.amp.GradScaler(self.device, enabled=args.amp, init_scale=1024.0, growth_interval=5)
        self.loader = mx.data.ResumableLoader(
            Pictures(args.size),
            batch_size=4,
            shuffle=True,
            seed=3,
            num_workers=args.num_workers,
            pin_memory=self.device == "cuda",
            worker_init_fn=self.start_worker if args.num_workers else None,
        )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.faults = Faults(args.fault, self.rank, args.directory)
        torch.manual_seed(77 + self.rank)
        random.seed(78 + self.rank)
        np.random.seed(79 + self.rank)
        directory = args.directory / "ckpt"
        self.guard = mx.Guard(
            model=self.ddp,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=self.scaler if args.amp else None,
            loader=self.loader,
            directory=directory,
            prefix="job",
            flag_file=args.directory / "graceful_exit.json" if args.flag_file else None,
            periodic=[Every(directory, args.save_every, args.save_beside, keep_max=2)] if args.save_every else [],
        )
        self.faults.watch_saves()

    def meet(self) -> None:
        """The other ranks, before there is a model."""
        dist.init_process_group("gloo")
        self.world_size, self.group = dist.get_world_size(), None
        self.rank = -1 if self.args.late_rank else dist.get_rank()
        if self.args.setup == "gather":
            dist.all_gather([torch.zeros(1) for _ in range(self.world_size)], torch.ones(1))
        elif self.args.setup == "barrier":
            dist.barrier()
        elif self.args.setup == "group":
            self.group = dist.new_group(list(range(self.world_size)))

    def make_network(self, *more: nn.Module) -> Any:
        layers: list[nn.Module] = []
        for _ in range(4):  # enough for several buckets
            layers += [nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU()]
        network = nn.Sequential(*layers, *more, nn.Dropout(0.2), nn.Linear(24, 5))
        if self.args.megabytes:
            network.register_parameter("bulk", nn.Parameter(torch.zeros(self.args.megabytes << 18)))
        return network

    def make_optimizer(self) -> Any:
        if self.args.shard == "zero":
            return ZeroRedundancyOptimizer(self.network.parameters(), torch.optim.AdamW, lr=1e-2)
        rate: Any = torch.tensor(1e-2) if self.args.compile == "step" else 1e-2  # as Boundaries tells
        return torch.optim.AdamW(self.network.parameters(), lr=rate)

    def wrap(self, network: Any) -> Any:
        args = self.args
        if args.shard == "fsdp":
            return fully_shard(network)
        if args.compile == "model":
            network = torch.compile(network, backend="aot_eager")
        cap = 0.002 if args.compile == "no" else None  # dynamo does not take one that is smaller than the first bucket
        ddp: Any = nn.parallel.DistributedDataParallel(
            network, bucket_cap_mb=cap, find_unused_parameters=bool(args.megabytes)
        )
        if args.compress:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return torch.compile(ddp, backend="aot_eager") if args.compile == "ddp" else ddp

    @property
    def step(self) -> int:
        """The number of the step under way."""
        return int(self.guard.step) + 1

    @property
    def updates(self) -> bool:
        """Whether this step ends a window of accumulation."""
        return bool(self.number % self.args.accumulate == 0)

    def run(self, train: Any) -> None:
        if self.args.with_guard:
            with self.guard:
                train(self)
        else:
            self.guard.run(lambda: train(self))
        digest = digest_of(self.network, self.optimizer, self.scheduler, self.scaler if self.args.amp else None)
        say(f"DONE {self.rank} {digest} {self.guard.step}")

    # --- the parts of the training ---

    def epochs(self) -> Iterator[int]:
        say(f"READY {self.rank} {os.getpid()} {self.guard.resumed_from_step}")
        if self.args.resources:
            self.tell_resources()
        if self.args.inside == "hooks":
            forward: Any = self.network.forward
            setattr(self.network, "forward", lambda x: 0.9 * forward(x))  # noqa: B010
            self.network[2].register_forward_hook(lambda _, __, output: 1.1 * output)
            self.optimizer.register_step_post_hook(lambda *_: self.shrink())
        for epoch in self.guard.epochs(self.args.epochs):
            self.number = 0
            yield epoch

    def begin(self, epoch: int, index: torch.Tensor) -> None:
        say(f"SEEN {epoch} {','.join(map(str, index.tolist()))} {self.rank} {self.step}")
        self.number += self.args.accumulate > 1
        self.count += self.args.inside == "count"
        self.faults.at(self.step, "start")
        if self.args.step_s:
            time.sleep(self.args.step_s)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor
        with self.reducing(), torch.autocast("cpu", torch.bfloat16, enabled=self.args.amp):
            loss = self.criterion(self.ddp(x).float(), y) / self.args.accumulate
        self.faults.at(self.step, "forward")
        return loss

    def reducing(self) -> Any:
        return contextlib.nullcontext() if self.updates else self.ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        with self.reducing():
            self.scaler.scale(loss).backward()
        self.faults.at(self.step, "backward")

    def update(self) -> None:
        if self.updates:
            if self.args.clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
            if self.compiled_step is not None:
                self.compiled_step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.faults.at(self.step, "update")
            self.scheduler.step()
            self.optimizer.zero_grad()

    def end(self, **told: torch.Tensor) -> None:
        step = self.step
        self.guard.step_end(**told)
        self.faults.at(step, "after")
        if step == self.args.hold_at:
            say(f"HOLD {self.rank} {step}")
            while not (self.args.directory / "go").exists():
                time.sleep(0.01)
                self.guard.poll()

    def do_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = self.forward(x, y)
        self.backward(loss)
        self.update()
        self.end(loss=loss)

    def start_worker(self, number: int) -> None:
        """In a loader worker."""
        self.faults.at(self.step, "worker")

    def shrink(self) -> None:
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.mul_(0.999)

    def evaluate(self) -> None:
        with self.guard.outside_step():
            self.network.eval()
            with torch.inference_mode() if self.args.evaluate == "inference" else torch.no_grad():
                for start in range(0, 24, 8):
                    self.guard.poll()
                    model = self.ddp if self.args.evaluate == "ddp" else self.network
                    model(self.loader.dataset.x[start : start + 8])  # type: ignore[attr-defined]
                    self.faults.at(self.guard.step, "eval")
            self.network.train()

    def tell_resources(self) -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        fds = len(os.listdir("/proc/self/fd"))
        files = sum(path.is_file() for path in Path(os.environ["MINDX_ARENA_DIR"]).rglob("*"))
        words = status["Threads"].strip(), fds, status["VmRSS"].split()[0], files
        say(f"RESOURCES {self.rank} {self.guard.step} {' '.join(map(str, words))}")


def plain(t: Training) -> None:
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            t.do_step(x, y)
        if t.args.evaluate != "no":
            t.evaluate()


def digest_of(network: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any = None) -> str:
    """Of the weights, the optimizer, the schedule, the scaler and the random streams."""
    digest, local = hashlib.sha256(), getattr(optimizer, "optim", optimizer)  # what is spread over ranks: its own part
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode() + _own_bytes(tensor))
    for number, state in sorted(local.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            digest.update(f"{number}{name}".encode() + _own_bytes(torch.as_tensor(value)))
    scale = None if scaler is None else scaler.state_dict()
    others = {**scheduler.state_dict(), "scaler": scale, "python": random.getstate()}
    digest.update(repr(sorted((name, repr(value)) for name, value in others.items())).encode())
    digest.update(torch.get_rng_state().numpy().tobytes() + repr(np.random.get_state()).encode())
    if torch.cuda.is_initialized():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()[:24]


def _own_bytes(tensor: torch.Tensor) -> bytes:
    """Of a tensor that is split over ranks this rank's part."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.contiguous().cpu().numpy().tobytes()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Training(make_parser().parse_args()).run(plain)
    dist.destroy_process_group()
