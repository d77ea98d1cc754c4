"""A training job for the system tests: `Model` with the documented callbacks, alone or under torchrun.

Prints ``READY rank pid resumed_from``, ``HOLD rank step``, ``EVAL epoch value`` and ``DONE rank sha256 step``.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.terminating_message import ExceptionCheckpoint
from tests.jobs.kit import say
from tests.jobs.loop import Pictures, build_network, hold, weights_hash


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--plain-loader", action="store_true")
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument(
        "--tft", action="store_true", help="TFTRegister and its wrapper, in place of ExceptionCheckpoint"
    )
    parser.add_argument("--gan", action="store_true", help="a custom training step with two optimizers")
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--hold-in-eval", type=int, default=-1)
    parser.add_argument(
        "--hold-in-step-eval", type=int, default=-1, help="evaluate in this step, until the process ends"
    )
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--kill-at", type=int, default=-1, help="rank 1 kills itself in a callback of this step")
    parser.add_argument("--eval-only", action="store_true", help="no training; OnRequestExit on rank 0")
    parser.add_argument("--unguarded", action="store_true", help="see `train_without_a_guard`")
    return parser.parse_args()


class Drop(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """`Pictures` without the index, as networks want it."""

    def __init__(self) -> None:
        self.pictures = Pictures(90)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index][:2]


def guard_of(model: mx.Model) -> mx.Guard:
    guard: Any = model._guard
    return guard  # type: ignore[no-any-return]


class Watch(mx.Callback):
    """Counts steps (the counter must resume), holds, fails and evaluates where it is told to."""

    def __init__(self, args: argparse.Namespace, model: mx.Model, rank: int) -> None:
        self.args, self.model, self.rank = args, model, rank
        self.steps = self.own = 0  # with --kill-at the latter is another number on each rank

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.own = state["steps"], state["own"]

    def on_train_begin(self, run_context: mx.RunContext) -> None:
        say(f"READY {self.rank} {os.getpid()} {self.model.resumed_from_step}")

    def on_train_step_end(self, run_context: mx.RunContext) -> None:
        self.steps += 1
        self.own += (self.rank + 1) * (self.args.kill_at > 0)
        step = run_context.original_args().cur_step_num
        if step % 3 == 0:
            self.evaluate(step)
        if self.model.resumed_from_step is not None:
            return
        if step == self.args.hold_at:
            hold(guard_of(self.model), self.rank)
        if step == self.args.kill_at and self.rank == 1:
            say(f"KILL {self.rank} {step}")
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.args.fail_at and self.rank == self.args.fail_rank:
            raise RuntimeError("injected in a callback")

    def evaluate(self, step: int) -> None:
        holds = step == self.args.hold_in_step_eval and self.model.resumed_from_step is None
        loader = torch.utils.data.DataLoader(Drop(), batch_size=10, shuffle=True)
        metrics = self.model.eval(loader, callbacks=[HoldInEval(self, for_ever=True)] if holds else [])
        say(f"STEP_EVAL {self.rank} {step} {metrics['loss']:.12f}")

    def on_train_epoch_end(self, run_context: mx.RunContext) -> None:
        params = run_context.original_args()
        loader = torch.utils.data.DataLoader(Drop(), batch_size=10)
        holds = params.cur_epoch_num == self.args.hold_in_eval and self.model.resumed_from_step is None
        metrics = self.model.eval(loader, callbacks=[HoldInEval(self)] if holds else [])
        say(f"EVAL {params.cur_epoch_num} {self.rank} {metrics['loss']:.12f}")

    def on_train_end(self, run_context: mx.RunContext) -> None:
        say(f"STEPS {self.rank} {self.steps}")


class HoldInEval(mx.Callback):
    """Keeps an evaluation at its second batch until an alarm is heard; `for_ever`: until the guard has had enough."""

    def __init__(self, watch: Watch, *, for_ever: bool = False) -> None:
        self.watch, self.batches, self.for_ever = watch, 0, for_ever

    def on_eval_step_begin(self, run_context: mx.RunContext) -> None:
        self.batches += 1
        if self.batches == 2:
            guard = guard_of(self.watch.model)
            hold(guard, self.watch.rank)
            while self.for_ever:
                guard.poll()
                time.sleep(0.005)


class TwoSteps(mx.Model):
    """Two optimizers that step one after the other, as in a GAN."""

    def train_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        assert self.loss_fn is not None
        losses = []
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            loss = self.loss_fn(self.network(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def build_model(args: argparse.Namespace) -> mx.Model:
    network = build_network()
    half = list(network.parameters())
    optimizers: Any = torch.optim.Adam(network.parameters(), lr=1e-2)
    if args.gan:
        optimizers = [torch.optim.Adam(half[:6], lr=1e-2), torch.optim.SGD(half[6:], lr=1e-2, momentum=0.9)]
    if args.tft:
        optimizers = mx.OptTFTWrapper(optimizers)
    first = optimizers[0] if args.gan else optimizers
    return (TwoSteps if args.gan else mx.Model)(
        network,
        nn.CrossEntropyLoss(),
        optimizers,
        metrics={"loss"},
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(first, 100),
        grad_accum=args.grad_accum,
    )


def main() -> None:
    torch.set_num_threads(1)
    args = parse()
    rank = int(os.environ.get("RANK", "0"))
    model = build_model(args)
    config = mx.CheckpointConfig(
        save_checkpoint_steps=args.save_steps or 10**6,
        keep_checkpoint_max=35,
        append_info=[{"epoch_num": 1}],
        exception_save=True,
        async_save=args.async_save,
    )
    callbacks: list[mx.Callback] = [Watch(args, model, rank)]
    if args.tft:
        callbacks.append(mx.TFTRegister(0, "127.0.0.1", 30051, args.directory))
    else:
        callbacks.append(ExceptionCheckpoint(prefix="net", directory=args.directory, config=config))
        if args.save_steps:
            callbacks.append(mx.ModelCheckpoint(prefix="net", directory=args.directory, config=config))
    loader: Any = torch.utils.data.DataLoader(Drop(), batch_size=5, shuffle=True, num_workers=args.num_workers)
    if not args.plain_loader:
        loader = mx.data.ResumableLoader(Drop(), batch_size=5, shuffle=True, num_workers=args.num_workers)
    if args.eval_only:
        asked = mx.OnRequestExit(directory=args.directory)
        say(f"LOSS {rank} {model.eval(loader, asked)['loss']:.6f}")
        return
    if args.unguarded:
        return train_without_a_guard(model, loader, rank)
    model.train(args.epochs, loader, callbacks=callbacks)
    say(f"DONE {rank} {weights_hash(model.bare_network)} {model.position.step}")


class Broken(mx.Callback):
    """Fails behind the meeting over the ranks' callbacks."""

    def exit_policies(self) -> Sequence[Any]:
        raise RuntimeError("injected behind the meeting")


def train_without_a_guard(model: mx.Model, loader: Any, rank: int) -> None:
    """Rank 1 cannot start the first training. Says ``REFUSED rank class message``, then trains on all ranks."""
    try:
        model.train(1, loader, callbacks=[Broken()] if rank == 1 else [])
    except Exception as error:
        say(f"REFUSED {rank} {model.position.step} {type(error).__name__} {error}")
    model.train(1, loader)
    say(f"TRAINED {rank} {model.position.step}")


if __name__ == "__main__":
    main()
