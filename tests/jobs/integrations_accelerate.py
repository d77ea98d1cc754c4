"""A training with Accelerate, as its documentation shows it, and a guard: ``DIRECTORY [options]``.

Writes ``STEP number rank pid loss lr`` after each step, and ``HASH digest rank`` at the end.
``--own``: by the library's own means, as its documentation shows them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mindx_elastic.integrations import accelerate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--own", type=int, default=0, metavar="N", help="save_state every N steps, skip_first_batches")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--split", action="store_true")
parser.add_argument("--stream", action="store_true", help="samples that come without a length")
parser.add_argument("--seedable", action="store_true", help="the library's own sampler, seeded by the epoch")
parser.add_argument("--drop-last", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--freeze", action="store_true", help="the first layer does not learn")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=76)
parser.add_argument("--stop-at", type=int, help="the step behind which the rank --stop-rank gets SIGTERM")
parser.add_argument("--stop-rank", type=int, default=0)
parser.add_argument("--kill", action="store_true", help="SIGKILL in its place, in the first attempt")
args = parser.parse_args()


class Noisy(Dataset[Any]):
    """A data set that augments with torch's and Python's streams."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 20, generator=generator)
        self.y = torch.randint(0, 2, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(20) + 0.01 * random.random(), self.y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Noisy(args.samples)
        return (samples[index] for index in range(args.samples))


class Counter:
    """An object of `register_for_checkpointing`."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def stop() -> None:
    if not args.kill:
        os.kill(os.getpid(), signal.SIGTERM)
    elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        say(f"KILLED {rank}")
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
config: Any = None
if args.split or args.stream or args.seedable:
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(
        split_batches=args.split, dispatch_batches=False, use_seedable_sampler=args.seedable, data_seed=7
    )
accelerator = Accelerator(
    cpu=int(os.environ.get("WORLD_SIZE", "1")) > 1 or not torch.cuda.is_available(),
    gradient_accumulation_steps=args.accumulate,
    dataloader_config=config,
    dynamo_backend="aot_eager" if args.compile else None,
)
model: Any = torch.nn.Sequential(
    torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
)
if args.freeze:
    model[0].requires_grad_(False)
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
data: Any = Stream() if args.stream else Noisy(args.samples)
loader: Any = DataLoader(
    data, 8, shuffle=None if args.stream else True, num_workers=args.workers, drop_last=args.drop_last
)
held_out: Any = DataLoader(Noisy(16), batch_size=8)
counter = Counter()
accelerator.register_for_checkpointing(counter)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
rank = accelerator.process_index


class Own:
    """The pattern of the documentation: states by step, the newest one is loaded, its batches are skipped."""

    def __init__(self) -> None:
        self.step = self.skipped = 0

    def __enter__(self) -> None:
        found = [int(path.name.removeprefix("step_")) for path in Path(args.directory).glob("step_*")]
        self.step = max(found, default=0)
        if self.step:
            accelerator.load_state(f"{args.directory}/step_{self.step}")
        say(f"OWN {self.step or None}")

    def __exit__(self, *_: object) -> None:
        pass

    def epochs(self, num_epochs: int) -> Iterator[int]:
        global loader
        whole = loader
        for epoch in range(self.step // len(whole) + 1, num_epochs + 1):
            whole.set_epoch(epoch)
            loader = accelerator.skip_first_batches(whole, self.step % len(whole))
            yield epoch

    def outside_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step_end(self) -> None:
        self.step += 1
        if self.step % args.own == 0:
            accelerator.save_state(f"{args.directory}/step_{self.step}")


guard: Any = Own() if args.own else elastic.guard(accelerator, loader=loader, directory=args.directory)
with guard:
    for epoch in guard.epochs(args.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.value += 1
            number, rate = guard.step + 1, optimizer.param_groups[0]["lr"]
            say(f"STEP {number} {rank} {os.getpid()} {loss.item():.9f} {rate:.9f} {len(x)}")
            if (number, rank) == (args.stop_at, args.stop_rank):
                stop()
            guard.step_end()
        if args.evaluate:
            with guard.outside_step(), torch.no_grad():
                model.eval()
                seen = 0
                for _, y in held_out:
                    seen += len(accelerator.gather_for_metrics(y))
                    say(f"EVAL {epoch} {rank}")
                assert seen == 16, seen
assert counter.value == guard.step
digest = hashlib.sha256()
for value in accelerator.unwrap_model(model).state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
say(f"HASH {digest.hexdigest()[:16]} {rank}")
sys.exit(0)
