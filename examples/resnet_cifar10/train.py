"""Trains ResNet-20 on CIFAR-10 or on scikit-learn's digits; may be stopped anywhere and started again.

Alone:        python train.py --train-url out
Two ranks:    torchrun --standalone --nproc-per-node 2 train.py --train-url out

Run the same command after a SIGTERM, an exception or a flag file, and it goes on from the step it had reached. The last
line on rank 0's stdout is JSON with a hash of the weights; it is the same as that of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dataset import DataError, DataSplit, load_cifar10, load_digits_split
from download import download_cifar10
from mindx_elastic.config import RankInfo
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import MindxError
from mindx_elastic.terminating_message import ExceptionCheckpoint
from mindx_elastic.train import (
    Callback,
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    OnRequestExit,
    RunContext,
)
from resnet import ResNet20

__all__ = ["learning_rate_factor", "main", "parse_args", "weights_sha256"]

PREFIX = "resnet"
DEFAULT_DATA = Path("data")  # where --download puts CIFAR-10 when no --data-url is given


def at_least(low: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argument type: a finite number of `kind` that is not below `low`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {low:g}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in "invalid int value"
    return parse


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. A wrong one ends the process with code 2 and a message, as argparse does."""
    parser = argparse.ArgumentParser(
        description="Train ResNet-20; run the same command again after an interruption and it goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data-url", type=Path, metavar="DIR", help="CIFAR-10 in its binary layout; without it scikit-learn's digits"
    )
    data.add_argument(
        "--download",
        action="store_true",
        help=f"fetch CIFAR-10 into --data-url (or {DEFAULT_DATA}/) if not there",
    )
    data.add_argument("--limit-train", type=at_least(1, int), metavar="N", help="only the first N training pictures")
    data.add_argument("--num-workers", type=at_least(0, int), default=0, metavar="N", help="loader processes per rank")
    train = parser.add_argument_group("training")
    train.add_argument("--train-url", type=Path, default=Path("output"), metavar="DIR", help="checkpoints and events")
    train.add_argument("--epochs", type=at_least(1, int), default=10)
    train.add_argument(
        "--batch-size", type=at_least(1, int), default=32, metavar="N", help="pictures per batch and rank"
    )
    train.add_argument("--lr", type=at_least(0, float), default=0.1, help="highest learning rate")
    train.add_argument("--seed", type=at_least(0, int), default=0)
    train.add_argument("--grad-accum", type=at_least(1, int), default=1, metavar="K", help="batches per update")
    train.add_argument("--amp", action="store_true", help="automatic mixed precision")
    train.add_argument(
        "--log-steps", type=at_least(1, int), default=10, metavar="N", help="print the loss every N steps"
    )
    train.add_argument("--threads", type=at_least(1, int), default=1, metavar="N", help="CPU threads per rank")
    saving = parser.add_argument_group("saving")
    saving.add_argument(
        "--save-checkpoint-steps",
        type=at_least(0, int),
        default=0,
        metavar="N",
        help="0: only when stopped",
    )
    saving.add_argument(
        "--keep-checkpoint-max", type=at_least(1, int), default=5, metavar="N", help="periodic ones kept"
    )
    saving.add_argument("--fresh", action="store_true", help="start over, whatever --train-url holds; deletes nothing")
    saving.add_argument("--async-save", action="store_true", help="write periodic checkpoints during the training")
    return parser.parse_args(argv)


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over a ``state_dict``, sorted by name: name, dtype, shape and bytes of every tensor.

    Pass the state of the bare network: DDP's names would begin with ``module.``.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def learning_rate_factor(total_steps: int) -> Callable[[int], float]:
    """Linear warm-up over a twentieth of the steps, then half a cosine down to 0; a function of the step alone.

    A closed form through `LambdaLR` and not `OneCycleLR`: nothing about the total is stored in the checkpoint, so a
    resumed job may be given more epochs.
    """
    warm_up = max(1, total_steps // 20)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, total_steps - warm_up))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def load_data(args: argparse.Namespace) -> DataSplit:
    directory: Path | None = args.data_url
    if args.download:
        directory = download_cifar10(directory or DEFAULT_DATA)
    if directory is None:
        return load_digits_split(limit_train=args.limit_train)
    return load_cifar10(directory, limit_train=args.limit_train)


class TestAtEnd(Callback):
    """Measures the accuracy on the test set at the end of the last epoch.

    Inside the training and not after it: when the job is told to stop during this evaluation, the last step is
    saved and the same command does only the evaluation again.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.accuracy = math.nan

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        if params.cur_epoch_num == params.epoch_num:
            self.accuracy = float(params.model.eval(self.loader)["accuracy"])


def make_callbacks(args: argparse.Namespace, test: TestAtEnd) -> list[Callback]:
    """What makes the training stoppable and resumable; the same list on every rank."""
    config = CheckpointConfig(
        save_checkpoint_steps=max(1, args.save_checkpoint_steps),
        keep_checkpoint_max=args.keep_checkpoint_max,
        async_save=args.async_save,
    )
    callbacks: list[Callback] = [
        ExceptionCheckpoint(prefix=PREFIX, directory=args.train_url, config=config),
        # With MS_ENABLE_GRACEFUL_EXIT=1 it watches graceful_exit.json; {"GracefulExit": 1} in it stops the job.
        OnRequestExit(save_mindir=False, file_name=PREFIX, directory=args.train_url),
        LossMonitor(args.log_steps),
        test,
    ]
    if args.save_checkpoint_steps:
        callbacks.append(ModelCheckpoint(prefix=PREFIX, directory=args.train_url, config=config))
    return callbacks


def make_reproducible(args: argparse.Namespace) -> None:
    """Same command, same numbers: what torch would otherwise choose by machine or at run time is fixed here."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA's libraries when they are first used
    torch.set_num_threads(args.threads)  # the order of a sum depends on the number of threads
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)


def train(args: argparse.Namespace) -> None:
    ranks = RankInfo.from_env()
    say(f"rank {ranks.rank} of {ranks.world_size}: pid {os.getpid()}")
    make_reproducible(args)
    data = load_data(args)
    if ranks.rank == 0:
        say(data.description)

    loader = ResumableLoader(data.train, args.batch_size, shuffle=True, seed=args.seed, num_workers=args.num_workers)
    test = TestAtEnd(ResumableLoader(data.test, 256, num_workers=args.num_workers))
    network = ResNet20()
    optimizer = torch.optim.SGD(network.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    batches = math.ceil(len(data.train) / (args.batch_size * ranks.world_size))
    total_steps = args.epochs * math.ceil(batches / args.grad_accum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(total_steps))
    model = Model(
        network,
        nn.CrossEntropyLoss(),
        optimizer,
        metrics={"accuracy"},
        lr_scheduler=schedule,
        grad_accum=args.grad_accum,
        amp=args.amp,
    )
    model.train(args.epochs, loader, make_callbacks(args, test), resume="never" if args.fresh else "auto")
    if ranks.rank == 0:
        report = {
            "event": "train_end",
            "step": model.position.step,
            "epoch": model.position.epoch,
            "weights_sha256": weights_sha256(model.bare_network.state_dict()),
            "resumed_from_step": model.resumed_from_step,
            "test_accuracy": round(test.accuracy, 4),
        }
        say(json.dumps(report))


def say(line: str) -> None:
    """One line to stdout in one piece, at once: the lines of several ranks share a pipe under torchrun."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        train(args)
    except (DataError, MindxError) as error:  # wrong input: the message says it all, a traceback would bury it
        print(f"train.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
