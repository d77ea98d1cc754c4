"""A training with Transformers' trainer: ``DIRECTORY [options]``. Prints as `integrations_accelerate`.

``LOG rank entry`` for each entry of the log history at the end, without times. ``--own``: by the library's own means.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import warnings
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from mindx_elastic.integrations.transformers import ElasticTrainer

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--own", action="store_true", help="Trainer and resume_from_checkpoint")
parser.add_argument("--stop-at", type=int, help="the step behind which the rank --stop-rank gets the signal")
parser.add_argument("--stop-rank", type=int, default=0)
parser.add_argument("--stop-in-evaluation", action="store_true", help="in the evaluation behind that step")
parser.add_argument("--kill", action="store_true", help="SIGKILL, once: not in a process of a later attempt")
parser.add_argument("--raise-at", type=int, help="an exception in the middle of the step behind that one")
parser.add_argument("--samples", type=int, default=76)
parser.add_argument("--patience", type=int, help="stop early")
parser.add_argument("--set", nargs="*", default=[], help="arguments of the trainer: name=value")
args = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))


class Noisy(Dataset[Any]):
    """Masks as `DataCollatorForLanguageModeling` does, with torch's and Python's streams; samples of two lengths."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randint(5, 60, (size, 12), generator=generator)
        self.y = torch.randint(0, 2, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.x[index].clone()
        x[torch.rand(12) < 0.15] = 4
        x[int(random.random() * 12)] = 3
        return {"input_ids": x, "labels": self.y[index]}


def say(line: str) -> None:
    os.write(1, f"\n{line}\n".encode())  # progress bars of other ranks end without a line's end


def value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(text, text)


class Steps(TrainerCallback, ExportableState):
    """Tells of each step, and counts what it sees."""

    def __init__(self) -> None:
        self.steps = self.epochs = 0
        self.predicted = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps, "epochs": self.epochs}}

    def on_step_end(self, _: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        assert self.steps == state.global_step or args.own
        weights = sum(each.double().sum().item() for each in kwargs["model"].parameters())
        rate = kwargs["lr_scheduler"].get_last_lr()[0]
        say(f"STEP {state.global_step} {rank} {os.getpid()} {weights:.12f} {rate:.12f} {state.epoch:.6f}")
        self.predicted = 0
        if (state.global_step, rank) == (args.stop_at, args.stop_rank) and not args.stop_in_evaluation:
            stop()

    def on_substep_end(self, _: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == args.raise_at:
            raise RuntimeError("a fault of the program")

    def on_prediction_step(self, _: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.predicted += 1
        torch.rand(3)
        here = (state.global_step, rank) == (args.stop_at, args.stop_rank)
        if here and args.stop_in_evaluation and self.predicted == 2:
            say("EVALUATION is cut off")
            stop()

    def on_epoch_end(self, _: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs += 1
        say(f"MEAN {self.epochs} {rank} {os.getpid()} {state.global_step}")


def stop() -> None:
    if not args.kill:
        os.kill(os.getpid(), signal.SIGTERM)
    elif os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and not os.path.exists(f"{args.directory}/killed"):
        os.makedirs(args.directory, exist_ok=True)
        with open(f"{args.directory}/killed", "w"):
            say(f"KILLED {rank}")
        os.kill(os.getpid(), signal.SIGKILL)


warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=2,
    )
)  # fmt: skip
settings: dict[str, Any] = {
    "num_train_epochs": 3, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "learning_rate": 1e-3,
    "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 3, "seed": 0, "data_seed": 5,
    "use_cpu": int(os.environ.get("WORLD_SIZE", "1")) > 1 or not torch.cuda.is_available(),
}  # fmt: skip
settings |= {name: value(text) for name, _, text in (each.partition("=") for each in args.set)}
evaluates = settings.get("eval_strategy", "no") != "no" or settings.get("eval_on_start", False)
callbacks: list[Any] = [Steps()]
if args.patience is not None:
    callbacks.append(EarlyStoppingCallback(args.patience, 1.0))  # no loss is better by so much
kind: Any = Trainer if args.own else ElasticTrainer
trainer = kind(
    model=model, args=TrainingArguments(args.directory, **settings), train_dataset=Noisy(args.samples),
    eval_dataset=Noisy(24) if evaluates else None, callbacks=callbacks,
)  # fmt: skip
trainer.remove_callback(PrinterCallback)  # its line and the end of it are two writes, between which come other ranks'
if args.own:
    last = get_last_checkpoint(args.directory) if os.path.isdir(args.directory) else None
    say(f"OWN {last}")
    output = trainer.train(resume_from_checkpoint=last)
    if trainer.state.global_step < trainer.state.max_steps:
        sys.exit(0)
else:
    output = trainer.train()
for entry in trainer.state.log_history:
    kept = {name: each for name, each in entry.items() if not name.endswith(("_runtime", "_per_second"))}
    say(f"LOG {rank} {kept}")
digest = hashlib.sha256()
for each in model.state_dict().values():
    digest.update(each.cpu().numpy().tobytes())
say(f"HASH {digest.hexdigest()[:16]} {rank} {output.training_loss!r} {output.global_step}")
sys.exit(0)
