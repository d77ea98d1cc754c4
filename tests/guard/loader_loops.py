"""Loops that people write around a loader, one a form, for the tests of look-ahead: each trains `Tiny` and records the
samples of every step. They are stopped by a real signal to this very process."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mindx_elastic import Guard
from tests.harness import wait_until

__all__ = [
    "BATCHES",
    "EPOCHS",
    "FORMS",
    "TAKES_A_BATCH_FOR_GRANTED",
    "Pictures",
    "Run",
    "at_their_own_pace",
    "in_two_phases",
    "run_loop",
]

EPOCHS, BATCHES = 3, 5


class Pictures(Dataset[Any]):
    """Sample i is i and noise from every global stream."""

    def __init__(self, size: int = 2 * BATCHES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return torch.arange(4.0) * index / 10 + 0.1 * noise, index


class Run:
    """One process of a job: the model, what its steps saw, and the stop."""

    def __init__(self, guard: Guard, model: nn.Module, optimizer: torch.optim.Optimizer, stop_at: int | None) -> None:
        self.guard, self.model, self.optimizer, self.stop_at = guard, model, optimizer, stop_at
        self.steps: list[tuple[int, list[list[int]]]] = []
        self._seen: list[list[int]] = []
        self.before: Any = None
        """An iterator made before the guard was entered."""

    def forward(self, batch: Any) -> torch.Tensor:
        x, index = batch[0], batch[1]
        self._seen.append(index.tolist())
        return nn.functional.dropout(self.model(x), 0.3).pow(2).mean()

    def update(self) -> None:
        step = self.guard.position.step + 1
        if step == self.stop_at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: self.guard.stopper.agreed_step is not None, "the agreement")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append((step, self._seen))
        self._seen = []
        self.guard.step_end()

    def train(self, batch: Any) -> None:
        self.forward(batch).backward()
        self.update()


def plain(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for batch in loader:
            run.train(batch)


def nano(run: Run, loader: Any) -> None:
    """nanoGPT: primed before the loop, fetched after the forward; the iterator is made again at an epoch's end."""
    it = iter(loader)

    def fetch() -> Any:
        nonlocal it
        try:
            return next(it)
        except StopIteration:
            it = iter(loader)
            return next(it)

    batch = fetch()
    while run.guard.position.step < EPOCHS * BATCHES:
        loss = run.forward(batch)
        batch = fetch()
        loss.backward()
        run.update()


class Prefetcher:
    """NVIDIA's: `next` hands out what was fetched before, and fetches the following one."""

    def __init__(self, loader: Any) -> None:
        self.loader = iter(loader)
        self.preload()

    def preload(self) -> None:
        try:
            self.following = next(self.loader)
        except StopIteration:
            self.following = None

    def next(self) -> Any:
        batch = self.following
        self.preload()
        return batch


def nvidia(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        prefetcher = Prefetcher(loader)
        batch = prefetcher.next()
        while batch is not None:
            run.train(batch)
            batch = prefetcher.next()


def one_ahead(loader: Any) -> Iterator[Any]:
    """timm's: a generator that is one batch ahead of what it yields, and that takes the first one for granted."""
    first = True
    held: Any
    for following in loader:
        if not first:
            yield held  # noqa: F821
        first = False
        held = following
    yield held


def timm(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for batch in one_ahead(loader):
            run.train(batch)


def queue_of_three(loader: Any) -> Iterator[Any]:
    queue: collections.deque[Any] = collections.deque()
    for batch in loader:
        queue.append(batch)
        if len(queue) > 3:
            yield queue.popleft()
    while queue:
        yield queue.popleft()


def three_ahead(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for batch in queue_of_three(loader):
            run.train(batch)


def endless(run: Run, loader: Any) -> None:
    """A generator over all epochs, two ahead."""

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()
    queue = collections.deque(itertools.islice(source, 2))
    while run.guard.position.step < EPOCHS * BATCHES:
        queue.append(next(source))
        run.train(queue.popleft())


def accumulated_ahead(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        waiting = 0
        for batch in one_ahead(loader):
            run.forward(batch).backward()
            waiting += 1
            if waiting == 2:
                run.update()
                waiting = 0
        if waiting:
            run.update()


def at_their_own_pace(run: Run, loaders: Any) -> None:
    """Labelled data by epochs; unlabelled data one batch ahead, started over wherever it ends."""
    labelled, unlabelled = loaders
    others = iter(unlabelled)

    def fetch() -> Any:
        nonlocal others
        try:
            return next(others)
        except StopIteration:
            others = iter(unlabelled)
            return next(others)

    other = fetch()
    for _ in run.guard.epochs(EPOCHS):
        for batch in labelled:
            loss = run.forward(batch) + run.forward(other)
            other = fetch()
            loss.backward()
            run.update()


def in_two_phases(run: Run, loaders: Any) -> None:
    first, second = loaders
    for _ in run.guard.epochs(2):
        for batch in first:
            run.train(batch)
    for _ in run.guard.epochs(4):
        for batch in one_ahead(second):
            run.train(batch)


FORMS: dict[str, Callable[[Run, Any], None]] = {
    form.__name__: form
    for form in (
        plain,
        nano,
        nvidia,
        timm,
        three_ahead,
        endless,
        accumulated_ahead,
    )
}


TAKES_A_BATCH_FOR_GRANTED = ("accumulated_ahead", "timm")
"""An epoch without batches, as the last one is for a finished run, is an error in it."""


def run_loop(
    form: Callable[[Run, Any], None],
    directory: Path,
    *,
    stop_at: int | None = None,
    workers: int = 0,
    make: Callable[[], Any] | None = None,
    unnamed: bool = False,
    iterate_before: bool = False,
    **options: Any,
) -> tuple[Run, dict[str, torch.Tensor]]:
    """One process of the job. Raises GracefulExit where it is stopped; `Run` is in its `args` then."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = make() if make else DataLoader(Pictures(), batch_size=2, shuffle=True, num_workers=workers)
    before = iter(loader) if iterate_before else None
    named = None if unnamed else loader
    guard = Guard(model=model, optimizer=optimizer, loader=named, directory=directory, final_save=False, **options)
    run = Run(guard, model, optimizer, stop_at)
    run.before = before
    try:
        with guard:
            form(run, loader)
    except BaseException as error:
        error.run = run  # type: ignore[attr-defined]
        raise
    return run, {name: value.clone() for name, value in model.state_dict().items()}
