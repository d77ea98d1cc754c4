"""The jobs whose files version 0.1 left in this folder, as they resume from them.

    job.py load CASE=DIRECTORY...
    job.py commands CASE=FOLDER...

``load`` prints one JSON line for each case and rank: the position, the state and the next random numbers and samples
after a resume. ``commands`` prints one for each case: what ``mindx-elastic`` says of it. Both use public names and the
console command's entry point only, so that any version can run them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import mindx_elastic as mx
from mindx_elastic.cli.main import main as console
from mindx_elastic.plan import load_strategy
from mindx_elastic.terminating_message import ExceptionCheckpoint

EPOCHS = 50
Facts = dict[str, Any]
PLAN_KEYS = (
    *("restorable", "run_id", "attempt", "step", "epoch", "step_in_epoch", "created", "kinds", "exact", "resharded"),
    *("old_world_size", "new_world_size", "old_mesh", "ranks", "replica_groups", "restore_ranks", "restore_ranks_map"),
    *("total_bytes", "faults", "found_anything"),
)
STEP_KEYS = ("run_id", "attempt", "step", "epoch", "step_in_epoch", "batch_num", "kind", "ranks", "world_size")


class Samples(Dataset[tuple[torch.Tensor, int, int]]):
    """Eight vectors with noise drawn anew each time."""

    def __init__(self) -> None:
        self.x = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self.x[index] + 0.1 * torch.rand(3) + random.random(), index % 2, index


class Pairs(Samples):
    """`Samples` without the index, as `Model` wants them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return super().__getitem__(index)[:2]


class Counter:
    """A user's own object: one number, one tensor, one array."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"steps": 0, "mean": torch.zeros(2), "seen": np.zeros(2, dtype=np.int64)}

    def count(self) -> None:
        self.state = {name: value + 1 for name, value in self.state.items()}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


# --- facts ---


def digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    return hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode() + plain.numpy().tobytes()).hexdigest()[:16]


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the tensors by name; of a DTensor that of the whole, and of this rank's part under ``name@local``."""
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            found[name] = digest(tensor.full_tensor())
            found[f"{name}@local"] = digest(tensor.to_local())
        elif isinstance(tensor, torch.Tensor):
            found[name] = digest(tensor)
    return found


def optimizer_tensors(optimizer: Any) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    return {f"{number}.{key}": value for number, entry in sorted(state.items()) for key, value in entry.items()}


def random_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def facts_of(network: nn.Module, optimizer: Any, scheduler: Any, counter: Counter) -> Facts:
    return {
        "random": random_numbers(),
        "model": digests(network.state_dict()),
        "optimizer": digests(optimizer_tensors(optimizer)),
        "lr": optimizer.param_groups[0]["lr"],
        "last_epoch": scheduler.last_epoch,
        "counter": [counter.state["steps"], counter.state["mean"].tolist(), counter.state["seen"].tolist()],
    }


def position_of(position: Any) -> list[int]:
    return [position.step, position.epoch, position.step_in_epoch]


# --- jobs with a loop of their own ---


def small_network(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5, bias=False), norm, nn.Dropout(0.2), nn.Linear(5, 2, bias=False))


def flag_file(directory: Path) -> Path:
    return directory / "graceful_exit.json"


@dataclass
class Loop:
    """A loop on `Guard`: alone, in DDP, in FSDP2, or with each rank's part of the weights laid out by hand."""

    case: str
    directory: Path

    def __post_init__(self) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        layouts = None
        if self.case == "memory":
            torch.manual_seed(self.rank)
            self.network: nn.Module = nn.Linear(3, 4 // self.world_size)
            layouts = {"model.*": mx.Layout((self.world_size,), ("shard(0)",))}  # type: ignore[arg-type]
        else:
            self.network = small_network(nn.LayerNorm(5) if self.case == "fsdp" else nn.BatchNorm1d(5))
        self.wrapped: nn.Module = self.network
        if self.case == "fsdp" and self.world_size > 1:
            fully_shard(self.network, mesh=init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("dp",)))
        elif self.case in ("ddp", "ring") and self.world_size > 1:
            self.wrapped = nn.parallel.DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.counter = Counter()
        self.loader = mx.data.ResumableLoader(Samples(), batch_size=2, shuffle=True, seed=3)
        self.guard = mx.Guard(
            model=self.wrapped,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.loader,
            stateful={"counter": self.counter},
            directory=self.directory,
            prefix="net",
            append_info=[{"team": "north"}],
            layouts=layouts,
        )

    def load(self) -> Facts:
        with self.guard:
            found = {"position": position_of(self.guard.position)}
            found |= facts_of(self.network, self.optimizer, self.scheduler, self.counter)
            for _ in self.guard.epochs(EPOCHS):  # the first epoch may be over
                if indices := [batch[2].tolist() for batch in self.loader]:
                    found["samples"] = indices
                    break
            assert self.guard.resumed_path is not None
            path = self.guard.resumed_path.relative_to(self.directory.resolve())
            return {**found, "path": str(path)}


# --- jobs with Model ---


class Steps(mx.Callback):
    """Counts, and notes what a resume brought back."""

    def __init__(self, model: mx.Model) -> None:
        self.model, self.counter, self.found = model, Counter(), Facts()

    def state_dict(self) -> dict[str, Any]:
        return self.counter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counter.load_state_dict(state)

    def on_train_begin(self, run_context: mx.RunContext) -> None:
        model = self.model
        if self.model.resumed_from_step is not None:
            self.found = {"position": position_of(model.position)}
            self.found |= facts_of(model.bare_network, model.optimizers[0], model.lr_scheduler, self.counter)

    def on_train_step_end(self, run_context: mx.RunContext) -> None:
        self.counter.count()
        if self.found:
            run_context.request_stop()


@dataclass
class Trained:
    """`Model.train` with the documented callbacks."""

    case: str
    directory: Path

    def __post_init__(self) -> None:
        network = small_network(nn.BatchNorm1d(5))
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if self.case == "tft":
            optimizer = mx.OptTFTWrapper(optimizer)
        self.model = mx.Model(network, nn.CrossEntropyLoss(), optimizer, metrics={"loss"}, lr_scheduler=scheduler)
        self.steps = Steps(self.model)

    def callbacks(self) -> list[mx.Callback]:
        directory = str(self.directory)
        config = mx.CheckpointConfig(save_checkpoint_steps=4, keep_checkpoint_max=1, append_info=[{"team": "north"}])
        if self.case == "tft":
            return [self.steps, mx.TFTRegister(0, "127.0.0.1", 30051, directory)]
        if self.case == "request_exit":
            return [self.steps, mx.OnRequestExit(True, False, "Net", directory, config_file=flag_file(self.directory))]
        periodic = mx.ModelCheckpoint("net", directory, config)
        if self.case == "finished":
            return [self.steps, periodic]
        return [self.steps, ExceptionCheckpoint(prefix="net", directory=directory, config=config), periodic]

    def load(self) -> Facts:
        loader = mx.data.ResumableLoader(Pairs(), batch_size=2, shuffle=True, seed=3)
        self.model.train(3 if self.case == "finished" else EPOCHS, loader, callbacks=self.callbacks())
        return self.steps.found


MODEL_CASES = ("finished", "model", "request_exit", "tft")


def plan_of(document: Facts) -> Facts:
    """A plan without its prose."""
    return {name: document[name] for name in PLAN_KEYS}


def resume_event(directory: Path, rank: int) -> Facts:
    """What the newest resume of this rank said about itself."""
    lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "resume" and event["rank"] == rank]
    return {name: events[-1][name] for name in ("attempt", "exact", "resharded", "run_id")}


def load(number: int, case: str, directory: Path) -> None:
    """Resume from `directory` and print what came back."""
    facts: Facts = {"number": number, "case": case, "rank": int(os.environ.get("RANK", "0"))}
    try:
        facts |= (Trained if case in MODEL_CASES else Loop)(case, directory).load()
        facts |= resume_event(directory, facts["rank"])
        if facts["rank"] == 0:
            facts["resume_plan.json"] = plan_of(json.loads((directory / "resume_plan.json").read_text()))
    except mx.errors.MindxError as error:  # the cases behind it are looked at too
        facts["error"] = f"{type(error).__name__}: {error}"
    os.write(1, f"FACTS {json.dumps(facts)}\n".encode())


# --- commands ---


def ask(*words: object) -> str:
    """Run ``mindx-elastic`` in this process and return what it prints."""
    sys.argv = ["mindx-elastic", *map(str, words)]
    with redirect_stdout(io.StringIO()) as output:
        try:
            console()
        except SystemExit as leaving:
            if leaving.code:
                raise RuntimeError(f"{' '.join(sys.argv)}: exit code {leaving.code}\n{output.getvalue()}") from leaving
    return output.getvalue()


def strategy_facts(path: Path) -> Facts:
    """A strategy file in plain values."""
    strategy = load_strategy(path)
    found: Facts = {"world_size": strategy.world_size}
    for spec in strategy.tensors:
        layout = spec.layout
        split = [list(layout.mesh_shape), [str(placement) for placement in layout.placements], list(layout.ranks)]
        found[spec.name] = [list(spec.shape), spec.dtype, *split, list(layout.mesh_dim_names)]
    return found


def commands(case: str, folder: Path) -> None:
    """Print what the commands say of the case; the prose in their answers is left out."""
    ckpt = folder / "ckpt"
    plan, inspect, verify = (json.loads(ask(name, ckpt, "--json")) for name in ("plan", "inspect", "verify"))
    said: Facts = {
        "case": case,
        "plan": plan_of(plan),
        "inspect": [{name: step[name] for name in STEP_KEYS} for step in inspect["steps"]],
        "quarantined": inspect["quarantined"],
        "verify": {name: verify[name] for name in ("good", "bad", "quarantined", "bytes")},
    }
    if (folder / "run").is_dir():
        status = json.loads(ask("status", folder / "run", "--json"))
        said["status"] = {name: status[name] for name in ("attempts", "totals")}
    weights = folder / "weights.safetensors"
    ask("convert", ckpt, weights)
    with safe_open(weights, "pt") as file:
        said["convert"] = {name: digest(file.get_tensor(name)) for name in sorted(file.keys())}
    weights.unlink()
    said["strategy"] = strategy_facts(ckpt / "strategy.proto")
    groups = sorted(folder.glob("group/rank_*/group_info.pb"))
    said["group info"] = [mx.restore_group_info_list(path) for path in groups]
    os.write(1, f"FACTS {json.dumps(said)}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("load", "commands"))
    parser.add_argument("cases", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    for number, word in enumerate(args.cases):
        case, _, directory = word.partition("=")
        if args.action == "load":
            load(number, case, Path(directory))
        else:
            commands(case, Path(directory))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
