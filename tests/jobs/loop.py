"""A training job for the system tests: a user's own loop on `Guard`, alone or under torchrun.

Prints lines that tests wait for: ``READY rank pid resumed_from``, ``HOLD rank step``, ``SEEN epoch index,...`` and
``DONE rank sha256 step``. ``--hold-at STEP`` keeps the loop after that step until an alarm is heard, so that a signal
always finds it there. ``--inject``: faults that no signal can bring about, see `INJECTIONS`; each says that it has
fired.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import mindx_elastic as mx
from mindx_elastic.errors import SaveError
from mindx_elastic.guard import active
from mindx_elastic.guard import saver as saving_module
from mindx_elastic.guard.stop_save import StopPhase
from mindx_elastic.memory import snapshots as snapshotting_module
from mindx_elastic.platforms.flag_file import FlagFile
from tests.jobs.kit import kill_here, say


class Pictures(Dataset[tuple[torch.Tensor, int, int]]):
    """Random vectors with noise drawn again each time: the augmentation that must come out equal."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 24, generator=generator)
        self.y = torch.randint(0, 5, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        noise = torch.rand(24) + random.random() + float(np.random.rand())
        return self.x[index] + 0.1 * noise, int(self.y[index]), index


def build_network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):  # enough layers for several DDP buckets
        layers += [nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(24, 5))


def weights_hash(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def hold(guard: mx.Guard, rank: int) -> None:
    """Stay here until an alarm is heard (on any rank)."""
    say(f"HOLD {rank} {guard.position.step}")
    end = time.monotonic() + 60
    while guard.stopper.phase is StopPhase.TRAINING:
        if time.monotonic() > end:
            sys.exit("no alarm came in 60 s")
        time.sleep(0.005)
    alarm = guard.stopper.alarm
    if alarm is not None and alarm.kind not in ("exception", "peer"):  # then the coming boundary is the one to stop at
        guard.stopper.step_gate.wait_for_limit(60)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--hold-after", type=int, default=-1, help="hold this many steps after the start or resume")
    parser.add_argument("--ask-stop-at", type=int, default=-1, help="rank 0 calls guard.request_stop() in this step")
    parser.add_argument("--hold-in-eval", type=int, default=-1, help="epoch after which to hold between two steps")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--fail-where", choices=("forward", "after"), default="forward")
    parser.add_argument("--grace-s", type=float, default=30.0)
    parser.add_argument("--flag-file")
    parser.add_argument("--remove-redundancy", action="store_true")
    parser.add_argument("--save-every", type=int, default=0, help="a periodic checkpoint every so many steps; 0: none")
    parser.add_argument("--say-passed", action="store_true")
    parser.add_argument("--kill", default="", help="WHERE:STEP:RANK; WHERE: forward, update (in it), boundary or end")
    parser.add_argument("--kill-in-snapshot", default="", help="STAGE:COUNT[:RANK], see mindx_elastic.memory.snapshots")
    parser.add_argument("--inject", action="append", default=[], metavar="FAULT[:VALUE]")
    parser.add_argument("--ddp", choices=["given", "hidden", "static"], default="given", help="hidden: not the guard's")
    return parser.parse_args()


def kill_in_snapshot(order: str, rank: int) -> None:
    """``STAGE:COUNT[:RANK]``: die when a copy has come to this stage for the COUNT-th time."""
    stage, count, *victims = order.split(":")
    if victims and rank != int(victims[0]):
        return
    left = int(count)

    def reach(reached: str) -> None:
        nonlocal left
        left -= reached == stage
        if left == 0:
            kill_here(f"in {stage}")

    mock.patch.object(snapshotting_module, "reach", reach).start()


def is_played_on(guard: mx.Guard) -> bool:
    """Whether a stop's boundary is saved, so that the step that comes is made once more by the resumed run."""
    return guard.stopper.save.path is not None


class Trainer:
    """One rank's training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.network = build_network()
        self.wrapped: nn.Module = self.network
        if self.world_size > 1:
            dist.init_process_group("gloo")
            static = args.ddp == "static"
            self.wrapped = nn.parallel.DistributedDataParallel(self.network, bucket_cap_mb=0.002, static_graph=static)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)
        self.second = torch.optim.SGD(self.network[0].parameters(), lr=1e-3)  # type: ignore[index]
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=2000)
        self.per_epoch = torch.optim.lr_scheduler.ExponentialLR(self.second, 0.9)
        self.loader = mx.data.ResumableLoader(
            Pictures(args.size),
            batch_size=args.batch_size,
            shuffle=True,
            seed=3,
            num_workers=args.num_workers,
            worker_init_fn=announce_worker,
        )
        self.guard = mx.Guard(
            model=self.network if args.ddp == "hidden" else self.wrapped,
            optimizer=[self.optimizer, self.second],
            lr_scheduler=[self.scheduler, self.per_epoch],
            loader=self.loader,
            directory=args.directory,
            prefix="loop",
            grace_s=args.grace_s,
            flag_file=args.flag_file,
            remove_redundancy=args.remove_redundancy,
            save_every=args.save_every,
        )
        self.seen = ""

    def run(self) -> None:
        with self.guard:
            say(f"READY {self.rank} {os.getpid()} {self.guard.resumed_from_step}")
            for epoch in self.guard.epochs(self.args.epochs):
                for number, (x, y, index) in enumerate(self.loader, start=1):
                    self.seen = f"SEEN {epoch} {','.join(map(str, index.tolist()))}"
                    self.step(x, y, number)
                self.per_epoch.step()
                if epoch == self.args.hold_in_eval:
                    with self.guard.outside_step():
                        hold(self.guard, self.rank)
                        while True:
                            self.guard.poll()
                            time.sleep(0.01)
        if self.guard.resumed_from_step is None:
            self.kill("end", self.guard.position.step)
        say(f"DONE {self.rank} {weights_hash(self.network)} {self.guard.position.step}")

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        args, step = self.args, self.guard.position.step + 1
        if is_played_on(self.guard):
            begin_played_step(args.inject)
        elif step == args.hold_at and self.guard.resumed_from_step is None:
            begin_held_step(args)
        failing = step == args.fail_at and self.rank == args.fail_rank
        failing &= self.guard.resumed_from_step is None
        if step == args.ask_stop_at and self.rank == 0:
            self.guard.request_stop("enough")
        loss = nn.functional.cross_entropy(self.wrapped(x), y)
        self.kill("forward", step)
        if failing and args.fail_where == "forward":
            raise RuntimeError("injected in forward")
        (loss / args.accumulate).backward()
        if number % args.accumulate == 0:
            self.update()
        if not is_played_on(self.guard):
            say(self.seen)
        self.guard.step_end(loss=loss)
        self.kill("boundary", step)
        if args.say_passed and number % args.accumulate == 0:
            say(f"PASSED {self.rank} {self.guard.position.step}")
        if failing and args.fail_where == "after":
            raise RuntimeError("injected after the boundary")
        held = step == args.hold_at and self.guard.resumed_from_step is None
        if held or step - (self.guard.resumed_from_step or 0) == args.hold_after:
            hold(self.guard, self.rank)

    def kill(self, where: str, step: int) -> None:
        if self.args.kill == f"{where}:{step}:{self.rank}":
            kill_here(f"in {where} {step}")

    def update(self) -> None:
        self.optimizer.step()
        self.kill("update", self.guard.position.step + 1)
        self.second.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def announce_worker(worker_id: int) -> None:
    say(f"WORKER {os.getpid()}")


# --- injected faults ---


def file_size(value: str) -> None:
    """Files of more than so many bytes cannot be written, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(value), int(value)))


def replace_write(before: Callable[[Any], None]) -> None:
    """`before` comes in front of each checkpoint that is written."""
    write = getattr(saving_module, "write_checkpoint")  # noqa: B009

    def replaced(path: Any, *args: Any, **kwargs: Any) -> Any:
        before(path)
        return write(path, *args, **kwargs)

    mock.patch.object(saving_module, "write_checkpoint", replaced).start()


def of_one_rank(act: Callable[[Any], None]) -> Callable[[str], None]:
    """An injection whose value is the rank whose save of a stop it comes in front of."""
    return lambda value: replace_write(act) if value == os.environ.get("RANK", "0") else None


def stand_still(path: Any) -> None:
    say(f"STOPPED {os.environ['RANK']}")
    os.kill(os.getpid(), signal.SIGSTOP)


def disk_is_full(path: Any) -> None:
    say(f"FULL {os.environ['RANK']}")
    raise SaveError(f"{path}: cannot save: No space left on device", path=path)


def wait_for_second_alarm(path: Any) -> None:
    say("SAVING")
    while active.entered[0].stopper.events.path.read_text().count('"event": "alarm"') < 2:
        time.sleep(0.005)


def hang(what: str) -> None:
    """For ever: a real wait, not a slow machine, so that no test need look at a clock."""
    say(f"HANGS {what}")
    threading.Event().wait()


def hang_in_poll(flag: FlagFile) -> None:
    hang("flag")


INJECTIONS: dict[str, Callable[[str], None]] = {
    "file-size": file_size,
    "save-killed": of_one_rank(lambda _: kill_here("in the save")),
    "save-stopped": of_one_rank(stand_still),
    "save-full": of_one_rank(disk_is_full),
    "save-held": lambda _: replace_write(wait_for_second_alarm),
}
"""From the start. Later: `begin_held_step`, `begin_played_step`."""


def begin_held_step(args: argparse.Namespace) -> None:
    """The step that the job is held at: what hangs or is scarce from here on."""
    for order in args.inject:
        what, _, value = order.partition(":")
        if what == "hang-stderr":
            fill_stderr()
            # The lock of the handler is held by a thread that hangs in its write.
            threading.Thread(target=lambda: logging.getLogger("mindx_elastic").error("full"), daemon=True).start()
            say("HANGS stderr")
        elif what == "hang-flag":  # its file system is gone
            mock.patch.object(FlagFile, "poll", hang_in_poll).start()
        elif what == "hang-log":
            log = Path(args.directory) / "events.jsonl"
            log.rename(log.with_suffix(".kept"))
            os.mkfifo(log)  # opening it for writing waits for a reader
            say("HANGS log")
        elif what == "scarce-mib":  # of address space
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = pages * os.sysconf("SC_PAGE_SIZE") + (int(value) << 20)
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            say(f"SCARCE {value}")


def fill_stderr() -> None:
    """The process at its other end has stopped reading."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"x" * 4096)
    os.set_blocking(end, True)
    os.dup2(end, 2)


def begin_played_step(orders: Sequence[str]) -> None:
    """The step that a stop plays on: ``played:raise``, ``kill`` or ``hang``, on the last rank."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    say(f"PLAYS {rank}")
    if rank == size - 1 and "played:raise" in orders:
        raise RuntimeError("only in the step that is played on")
    if rank == size - 1 and "played:kill" in orders:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == size - 1 and "played:hang" in orders:
        threading.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = parse()
    for each in arguments.inject:
        name, _, text = each.partition(":")
        if name in INJECTIONS:
            INJECTIONS[name](text)
    if arguments.kill_in_snapshot:
        kill_in_snapshot(arguments.kill_in_snapshot, int(os.environ.get("RANK", "0")))
    Trainer(arguments).run()
    if dist.is_initialized():
        dist.destroy_process_group()
