"""Trainings as people write them, each with something outside of the function of its guard.

``shapes.py DIRECTORY SHAPE``: with ``--break PLACE:STEP`` that rank dies, its place is broken, and the others go on
with fewer. Prints READY, PID, SEEN (epoch, samples, rank, step, world), VALUE (what the shape has made of its own),
FAULT, BROKEN and DONE.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import mindx_elastic as mx

BATCH = 4
CLASSES = {"circle": 0, "square": 1, "star": 2}
log = logging.getLogger("shapes")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


@dataclasses.dataclass
class Config:
    """As a training script has it."""

    width: int = 16
    rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    tags: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])


def meet(directory: Path, step: int, rank: int, world_size: int, *, waits: bool) -> None:
    """As in ``fewer.py``: who is about to die waits until all have passed the boundary before this step."""
    (directory / f"at_{step}_{rank}").touch()
    while waits and len([*directory.glob(f"at_{step}_*")]) < world_size:
        time.sleep(0.005)


class Points(Dataset[Any]):
    def __init__(self, size: int, transform: Callable[[Any], Any]) -> None:
        generator = np.random.default_rng(1)
        self.x = generator.standard_normal((size, 8)).astype(np.float32)
        self.y = generator.integers(0, 3, size)
        self.paths = [(f"images/{number:06}.png", int(label)) for number, label in enumerate(self.y)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.from_numpy(self.x[index])), int(self.y[index]), index


class Meter:
    """A metric that nobody has named to the guard."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(2), 0
        self.confusion = np.zeros((3, 3), dtype=np.int64)
        self.history: list[float] = []
        self.last: deque[float] = deque(maxlen=4)
        self.by_epoch: dict[int, list[float]] = defaultdict(list)

    def update(self, loss: float, wanted: torch.Tensor, found: torch.Tensor, epoch: int) -> None:
        self.total += torch.tensor([loss, 1.0])
        self.count += len(wanted)
        np.add.at(self.confusion, (wanted.numpy(), found.numpy()), 1)
        self.history.append(loss)
        self.last.append(loss)
        self.by_epoch[epoch].append(loss)

    def text(self) -> str:
        sums = f"{float(self.total[0]):.9f} {float(self.total[1])} {self.count} {self.confusion.ravel().tolist()}"
        return f"{sums} {len(self.history)} {len(self.last)} {sorted(self.by_epoch)}"


class Writer:
    """As TensorBoard's: a file of its own on the first rank."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "w")  # noqa: SIM115

    def add(self, tag: str, value: float, step: int) -> None:
        self.file.write(f"{tag} {value} {step}\n")
        self.file.flush()


_WORLD: int | None = None


def world_size() -> int:
    """As many a `utils.py` has it."""
    global _WORLD
    if _WORLD is None:
        _WORLD = dist.get_world_size()
    return _WORLD


@functools.cache
def cached_world_size() -> int:
    return dist.get_world_size()


class Shape:
    """What a program has beside its training."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.value: Callable[[], Any] = lambda: ""
        self.at_begin: Callable[[], None] = lambda: None
        self.at_step: Callable[[int, float], None] = lambda step, loss: None
        self.outside: Any = None
        getattr(self, f"set_{name}")()

    def set_plain(self) -> None:
        pass

    def set_workers(self) -> None:
        """The training's loader has them."""

    def set_world(self) -> None:
        self.outside = dist.get_world_size()

    def set_rank(self) -> None:
        self.outside = dist.get_rank()

    def set_closure(self) -> None:
        size = dist.get_world_size()
        self.outside = functools.partial(lambda value, scale: value / scale / size, scale=2)

    def set_environment(self) -> None:
        os.environ["SHAPES_WORLD"] = str(dist.get_world_size())

    def set_sampler(self) -> None:
        data = TensorDataset(torch.zeros(12, 1))
        self.outside = DataLoader(data, 2, sampler=DistributedSampler(data))

    def set_validation(self) -> None:
        """A loader of an evaluation that is ours: its position is no checkpoint's."""
        loader = mx.data.ResumableLoader(range(24), 2, shuffle=True, seed=5)
        seen: list[int] = []
        self.outside = loader

        def evaluate(step: int, loss: float) -> None:
            seen.extend(index for batch in loader for index in batch.tolist())

        self.at_step, self.value = evaluate, lambda: f"{len(seen)} {seen[-4:]}"

    def set_lazy(self) -> None:
        self.value = lambda: f"{world_size()} {dist.get_world_size()}"
        self.at_step = lambda step, loss: say(f"WORLD {world_size()} {dist.get_world_size()}")

    def set_cached(self) -> None:
        self.value = lambda: f"{cached_world_size()} {dist.get_world_size()}"
        self.at_step = lambda step, loss: say(f"WORLD {cached_world_size()} {dist.get_world_size()}")

    def set_attribute(self) -> None:
        def size() -> int:
            if not hasattr(self.args, "size_of_job"):
                self.args.size_of_job = dist.get_world_size()
            return int(self.args.size_of_job)

        self.at_step = lambda step, loss: say(f"WORLD {size()} {dist.get_world_size()}")

    def set_kept(self) -> None:
        """A sampler that is made in the function, once."""

        def sampler() -> Any:
            if self.outside is None:
                self.outside = DistributedSampler(TensorDataset(torch.zeros(12, 1)))
            return self.outside

        self.at_begin = lambda: say(f"WORLD {sampler().num_replicas} {dist.get_world_size()}")

    def set_counted(self) -> None:
        """As `kept`, without a question: by how many take part."""
        found: list[Any] = []

        def count() -> int:
            if not found:
                parts: list[Any] = [None] * 8
                dist.all_gather_object(parts, 1)
                found.append(sum(filter(None, parts)))
            return int(found[0])

        self.at_begin = lambda: say(f"WORLD {count()} {dist.get_world_size()}")

    def set_anew(self) -> None:
        """A sampler that is made in each call of the function."""

        def begin() -> None:
            self.outside = DistributedSampler(TensorDataset(torch.zeros(12, 1)))
            say(f"WORLD {self.outside.num_replicas} {dist.get_world_size()}")

        self.at_begin = begin

    def set_by_task(self) -> None:
        """A sampler for each of several tasks, made when it comes for the first time."""

        @functools.cache
        def sampler(task: int) -> Any:
            return DistributedSampler(TensorDataset(torch.zeros(12 + task, 1)))

        self.at_step = lambda step, loss: say(f"WORLD {sampler(step % 5).num_replicas} {dist.get_world_size()}")

    def set_stream(self) -> None:
        """A generator that outlives the function, and asks once a pass."""

        def stream() -> Any:
            while True:
                size = dist.get_world_size()
                for _ in range(3):
                    yield size

        values = stream()
        self.at_step = lambda step, loss: say(f"WORLD {next(values)} {dist.get_world_size()}")

    def set_logged(self) -> None:
        """The mean over the ranks, in each step."""

        def tell(step: int, loss: float) -> None:
            mean = torch.tensor([loss])
            dist.all_reduce(mean)
            say(f"WORLD {dist.get_world_size()} {os.environ['WORLD_SIZE']}")

        self.at_step = tell

    def set_compiled(self) -> None:
        """What is compiled may have the number of ranks in it."""
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

    def set_threads(self) -> None:
        self.at_step = lambda step, loss: torch.set_num_threads(1 + step % 2)

    def set_length(self) -> None:
        """A schedule over the whole training, made where the model is."""
        loader = mx.data.ResumableLoader(range(24), 2, shuffle=True, seed=5)
        self.outside = 3 * len(loader)

    def set_thread(self) -> None:
        threading.Thread(target=threading.Event().wait, name="counter", daemon=True).start()

    def set_log(self) -> None:
        """Each start begins the file anew."""
        self.outside = Writer(self.args.directory / f"log_{dist.get_rank()}.txt")
        self.at_step = lambda step, loss: self.outside.add("loss", loss, step)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("shape")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--break", dest="breaks", default="", help="PLACE:STEP,...: dies, and its place is broken")
    parser.add_argument("--dies", default="", help="PLACE:STEP,...: dies, and its place is not broken")
    parser.add_argument("--term-waiting", action="store_true", help="SIGTERM to the agent when the first rank waits")
    parser.add_argument("--calm", action="store_true", help="nothing is drawn")
    parser.add_argument("--layer", action="store_true", help="a norm that bears a batch of one")
    parser.add_argument("--hold", action="store_true", help="wait for the file go in front of the break")
    parser.add_argument("--hangs", action="store_true", help="a process in a broken place hangs")
    return parser.parse_args()


def own_place() -> int:
    """Without a question that would be the program's (see `mindx_elastic.rejoin.asked`)."""
    variables: Any = os.environ
    places, local = variables._data[b"MINDX_PLACES"].decode(), variables._data[b"LOCAL_RANK"]
    return int(places.split(",")[int(local)])


def break_place(args: argparse.Namespace, step: int, rank: int, size: int) -> None:
    place = own_place()
    if f":{step}" in f"{args.breaks},{args.dies}":
        meet(args.directory, step, rank, size, waits=f"{place}:{step}" in f"{args.breaks},{args.dies}".split(","))
    words = [*((word, True) for word in args.breaks.split(",")), *((word, False) for word in args.dies.split(","))]
    for word, breaks in words:
        done = args.directory / f"done_{place}_{step}"
        if word != f"{place}:{step}" or done.exists():
            continue
        if args.hold:
            say(f"HOLD {place}")
        while args.hold and not (args.directory / "go").exists():
            time.sleep(0.01)
        done.touch()
        if breaks:
            (args.directory / f"broken_{place}").touch()
        say(f"FAULT {place} {step}")
        os.kill(os.getpid(), signal.SIGKILL)


def stop_waiting() -> None:
    """SIGTERM to the agent as soon as this process waits for its new rank: by a child, see ``fewer.py``."""
    parent, agent = os.getpid(), os.getppid()
    if os.fork():
        return
    note = Path(os.environ["MINDX_AGENT_DIR"]) / f"waits_{parent}.json"
    while not note.exists() and os.getppid() == parent:
        time.sleep(0.001)
    if note.exists():
        say(f"TERM {agent}")
        os.kill(agent, signal.SIGTERM)
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = parse()
    if (args.directory / f"broken_{own_place()}").exists():
        say(f"BROKEN {own_place()}")
        if args.hangs:
            threading.Event().wait()
        sys.exit(3)
    dist.init_process_group("gloo")
    if args.term_waiting and own_place() == 0 and not os.environ.get("MINDX_TRIAL"):
        stop_waiting()
    config = Config(rate=5e-3)
    torch.manual_seed(0)
    norm = (nn.LayerNorm if args.layer else nn.BatchNorm1d)(config.width)
    network = nn.Sequential(nn.Linear(8, config.width), norm, nn.Dropout(0.0 if args.calm else 0.1), nn.ReLU())
    network.append(nn.Linear(config.width, len(CLASSES)))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, betas=config.betas)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    noise = np.random.default_rng(7).standard_normal(8).astype(np.float32)
    data = Points(args.size, transform=lambda x: x * 2 + torch.from_numpy(noise) / 100)
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if args.shape == "workers" else {}
    loader = mx.data.ResumableLoader(data, BATCH, shuffle=True, seed=3, **workers)
    loss_of = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
    shape = Shape(args.shape, args)
    meter = Meter()
    guard = mx.Guard(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        loader=loader,
        directory=args.directory / "ckpt",
        prefix="job",
        unmanaged="warn",
    )

    def train() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        say(f"READY {rank} {size} {guard.resumed_from_step}")
        say(f"PID {rank} {size} {os.getpid()}")
        shape.at_begin()
        for epoch in guard.epochs(3):
            window = guard.accumulation(args.accumulate)
            for number, (x, y, index) in guard.enumerate(loader, start=1):
                step = guard.step + 1
                say(f"SEEN {epoch} {','.join(map(str, index.tolist()))} {rank} {step} {size}")
                break_place(args, step, rank, size)
                found = model(x)
                loss = loss_of(found, y)
                (loss / window).backward()
                meter.update(float(loss), y, found.argmax(1), epoch)
                if number % window == 0 or number == len(loader):
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    shape.at_step(step, float(loss))
                    guard.step_end()

    guard.run(train)
    digest, own = hashlib.sha256(), hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    for value in network.buffers():  # each rank has its own, which DDP broadcasts in front of a forward
        own.update(value.numpy().tobytes())
    rank, total = dist.get_rank(), float(sum(value.double().abs().sum() for value in network.parameters()))
    say(f"VALUE {rank} {own.hexdigest()[:16]} {meter.text()} {shape.value()}")
    say(f"DONE {rank} {digest.hexdigest()[:16]} {guard.step} {total:.9f} {optimizer.param_groups[0]['lr']!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
