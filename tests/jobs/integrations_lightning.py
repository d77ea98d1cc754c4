"""A training with Lightning and the callback: ``DIRECTORY [options]``. Prints as `integrations_accelerate`.

``MEAN epoch rank loss rate`` at the end of each epoch, ``BEST`` at the end. ``--own``: by the library's own means.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from mindx_elastic.integrations.lightning import ElasticCallback

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--own", action="store_true", help="OnExceptionCheckpoint and ckpt_path")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--plateau", action="store_true")
parser.add_argument("--validate", type=float, default=0.0, help="val_check_interval; 0: no validation")
parser.add_argument("--best", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=80)
parser.add_argument("--stop-at", type=int, help="the step in which the rank --stop-rank gets SIGTERM")
parser.add_argument("--stop-in-validation", action="store_true", help="in the validation behind that step")
parser.add_argument("--raise-at", type=int)
parser.add_argument("--unseeded", action="store_true")
parser.add_argument("--stop-rank", type=int, default=0)
parser.add_argument("--kill", action="store_true", help="SIGKILL in its place, in the first attempt")
parser.add_argument("--in-update", action="store_true", help="stop or kill it right behind that step's update")
parser.add_argument("--loggers", action="store_true", help="CSV and TensorBoard; LOG lines at the end")
parser.add_argument("--features", action="store_true", help="averages, an accumulation schedule, hooks, a loose metric")
parser.add_argument("--order", choices=["stock", "own", "stream"], default="stock", help="who orders the samples")
args = parser.parse_args()
world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


class Noisy(Dataset[Any]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 20, generator=generator)
        self.y = torch.randint(0, 2, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(20) + 0.01 * random.random(), self.y[index]


class Drawn(Sampler[int]):
    """An order of the program's own, out of Python's stream."""

    def __len__(self) -> int:
        return int(args.samples)

    def __iter__(self) -> Iterator[int]:
        return iter(random.choices(range(args.samples), k=args.samples))


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        samples = Noisy(args.samples)
        return (samples[index] for index in range(args.samples))


def loader_of() -> DataLoader[Any]:
    if args.order == "stream":
        return DataLoader(Stream(), batch_size=8)
    order: dict[str, Any] = {"sampler": Drawn()} if args.order == "own" else {"shuffle": True}
    return DataLoader(Noisy(args.samples), batch_size=8, num_workers=args.workers, **order)


class EveryOther(pl.callbacks.EMAWeightAveraging):
    """As Lightning's pages show it: a subclass that says when."""

    def __init__(self) -> None:
        super().__init__(decay=0.8)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def stop() -> None:
    if not args.kill:
        os.kill(os.getpid(), signal.SIGTERM)
    elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        say(f"KILLED {rank}")
        os.kill(os.getpid(), signal.SIGKILL)


def tell_logged() -> None:
    """``LOG tag step value`` for all that TensorBoard's and the CSV logger's files of all runs hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in sorted(Path(args.directory, "tensorboard").glob("*/version_*")):
        events = EventAccumulator(str(folder))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                say(f"LOG tensorboard {tag} {event.step} {event.value}")
    for file in sorted(Path(args.directory, "csv").glob("*/version_*/metrics.csv")):
        for row in csv.DictReader(file.open()):
            for name in row:
                if row[name] and name != "step":
                    say(f"LOG csv {name} {row['step']} {row[name]}")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.1),
            torch.nn.Linear(32, 2),
        )  # fmt: skip
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)
        self.loose = torchmetrics.AUROC("binary")  # updated by hand, and never logged
        self.weight = 0.0

    @property
    def number(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop.total_batch_idx) + 1

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        out = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(out, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.accuracy(out, batch[1])
        if args.features:
            self.loose.update(out.softmax(1)[:, 1], batch[1])
            loss = loss * (1 + self.weight)
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        say(f"STEP {self.number} {rank} {os.getpid()} {loss.item():.9f} {self.global_step} {len(batch[0])}")
        if args.raise_at == self.number:
            raise RuntimeError("a fault of the program")
        if not args.stop_in_validation and not args.in_update:
            self.perhaps_stop()
        return loss

    def perhaps_stop(self, *_: Any) -> None:
        if (self.number, rank) == (args.stop_at, args.stop_rank):
            stop()

    def validation_step(self, batch: Any, index: int) -> None:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)
        torch.rand(3)
        if args.stop_in_validation and index == 1 and (self.number, rank) == (args.stop_at, args.stop_rank):
            say("VALIDATION is cut off")
            stop()

    def on_validation_epoch_end(self) -> None:
        say(f"VALUE {self.number} {rank} 0 {self.trainer.callback_metrics.get('val_loss')}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if args.in_update:
            optimizer.register_step_post_hook(self.perhaps_stop)
        if args.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.5, threshold=0.5
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss", "interval": "epoch"},
            }
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        self.weight = 0.1 * self.current_epoch

    def on_train_epoch_end(self) -> None:
        if args.features:
            say(f"VALUE loose {self.current_epoch} 0 {self.loose.compute()}")
            self.loose.reset()
        values: Any = self.trainer.callback_metrics
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        say(
            f"MEAN {self.current_epoch} {rank} 0 {values['train_loss'].item():.9f} "
            f"{values['train_accuracy_epoch'].item():.9f} {rate:.9f}"
        )


warnings.simplefilter("ignore")
torch.set_num_threads(1)
if not args.unseeded:
    pl.seed_everything(0, verbose=False)
module = Net()
saved = Path(args.directory, "on_exception.ckpt")
callbacks: list[Any] = [pl.callbacks.OnExceptionCheckpoint(saved.parent) if args.own else ElasticCallback(saved.parent)]
if args.best:
    callbacks.append(
        pl.callbacks.ModelCheckpoint(f"{args.directory}-best", monitor="val_loss", save_top_k=2, mode="min")
    )
    callbacks.append(pl.callbacks.EarlyStopping("val_loss", patience=50))
if args.features:
    callbacks += [EveryOther(), pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})]
loggers: Any = False
if args.loggers:
    kinds = (
        (pl.loggers.CSVLogger, f"{args.directory}/csv"),
        (pl.loggers.TensorBoardLogger, f"{args.directory}/tensorboard"),
    )
    loggers = [kind(folder) for kind, folder in kinds]
trainer = pl.Trainer(
    max_epochs=args.epochs, accelerator="cpu" if world_size > 1 else "auto", devices=world_size,
    strategy="ddp" if world_size > 1 else "auto",
    callbacks=callbacks, logger=loggers, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
    accumulate_grad_batches=args.accumulate, enable_checkpointing=args.best or args.own,
    val_check_interval=args.validate or 1.0, num_sanity_val_steps=2 if args.validate else 0,
    default_root_dir=args.directory,
)  # fmt: skip
train = loader_of()
again = saved if args.own and saved.exists() else None
if args.own:
    say(f"OWN {again}")
trainer.fit(module, train, DataLoader(Noisy(64), batch_size=16) if args.validate else None, ckpt_path=again)
digest = hashlib.sha256()
for value in module.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
if args.best:
    found: Any = trainer.checkpoint_callback
    scores = sorted(f"{float(value):.6f}" for value in found.best_k_models.values())
    say(f"HASH best {' '.join(scores)} {rank}")
say(f"HASH {digest.hexdigest()[:16]} {rank}")
if args.loggers and rank == 0:
    tell_logged()
