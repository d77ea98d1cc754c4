"""A small transformer for the tests of resharding: the same training under any way of spreading it over ranks.

``KIND DIRECTORY [--ranks N]``; KIND: ``2d`` (FSDP2 around tensor parallel), ``hsdp``, ``fsdp``, ``ddp``, ``zero`` (DDP,
the optimizer's state spread), ``plain`` (one rank). Every update is over the same 12
samples, however many ranks there are, so that losses can be compared between worlds.

Lines: ``READY rank pid resumed_from``, ``LOSS step value``, ``SEEN epoch index,... step step``, ``HOLD rank step``, and
``STATE step sha256``, from rank 0: over all weights and all of the optimizers' state, put together from all ranks by
plain concatenation, at each ``--save-at``, after the hold, at a resume and at the end.

``--ranks``: without torchrun, see `tests.jobs.forked`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812 - torch's name for it
from torch.utils.data import Dataset

import mindx_elastic as mx
from tests.jobs.forked import run_ranks
from tests.jobs.kit import say
from tests.jobs.loop import hold

SAMPLES_PER_UPDATE = 12
VOCABULARY, WIDTH, HEAD, HIDDEN, LENGTH = 31, 12, 3, 22, 8  # 31 and 22/2 rows: uneven shards
KINDS = ("2d", "hsdp", "fsdp", "ddp", "zero", "plain")
_TENSOR_PARALLEL: Mapping[str, type[ParallelStyle]] = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel),
    **dict.fromkeys(("out", "down"), RowwiseParallel),
}


class Sentences(Dataset[tuple[torch.Tensor, int]]):
    """Tokens that follow a rule with noise: something to learn."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        start = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
        noise = torch.randint(0, 2, (size, LENGTH + 1), generator=generator)
        self.tokens = (start + 3 * torch.arange(LENGTH + 1) + noise) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.tokens[index], index


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        # Split by heads, as many as this rank has.
        parts = [each(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        query, key, value = parts
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        added: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return added


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Spread:
    """The transformer on the ranks of this job."""

    def __init__(self, kind: str, world_size: int, tensor_parallel: int) -> None:
        torch.manual_seed(0)
        self.bare = Transformer()
        self.wrapped: nn.Module = self.bare
        self.data_rank, self.data_size, self.speaks = dist.get_rank(), world_size, True
        if kind == "2d":
            self._two_dimensional(world_size, tensor_parallel)
        elif kind == "hsdp":
            shape = (world_size // 2, 2) if world_size % 2 == 0 else (1, world_size)
            self._shard(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        elif kind == "fsdp":
            self._shard(init_device_mesh("cpu", (world_size,)))
        elif kind in ("ddp", "zero"):
            self.wrapped = nn.parallel.DistributedDataParallel(self.bare)
        self.optimizer = self._optimizer(kind)

    def _two_dimensional(self, world_size: int, tensor_parallel: int) -> None:
        mesh = init_device_mesh("cpu", (world_size // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
        for block in self.bare.blocks:
            parallelize_module(block, mesh["tp"], {name: style() for name, style in _TENSOR_PARALLEL.items()})
        self._shard(mesh["dp"])
        self.data_rank, self.data_size = mesh["dp"].get_local_rank(), world_size // tensor_parallel
        self.speaks = mesh["tp"].get_local_rank() == 0

    def _shard(self, mesh: DeviceMesh) -> None:
        for block in self.bare.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.bare, mesh=mesh)

    def _optimizer(self, kind: str) -> torch.optim.Optimizer:
        matrices = [p for p in self.bare.parameters() if p.ndim > 1]
        others = [p for p in self.bare.parameters() if p.ndim == 1]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)

    # --- the whole state, whoever holds what ---

    def digest(self) -> str:
        """Collective. Over every tensor of the model and the optimizer, as a single process would have it."""
        mine = {name: _described(tensor) for name, tensor in self._tensors()}
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        digest = hashlib.sha256()
        for name in sorted({name for each in everybody for name in each}):
            whole = _put_together([each[name] for each in everybody if name in each])
            digest.update(f"{name} {whole.dtype} {list(whole.shape)}".encode() + whole.numpy().tobytes())
        return digest.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        local: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        for name, parameter in self.bare.named_parameters():
            yield name, parameter
            for key, value in local.state.get(parameter, {}).items():
                yield f"{name}.{key}", value


_Described = tuple[tuple[int, ...], list[int], list[int], torch.Tensor]


def _described(tensor: torch.Tensor) -> _Described:
    """Mesh shape, this rank's coordinate in it, the dimension that each mesh dimension splits (-1: none), its part."""
    if not isinstance(tensor, DTensor):
        return (), [], [], tensor.detach().clone()
    mesh, splits = tensor.device_mesh, [getattr(p, "dim", -1) for p in tensor.placements]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return tuple(mesh.shape), list(coordinate), splits, tensor.to_local().detach().clone()


def _put_together(parts: list[_Described]) -> torch.Tensor:
    """FSDP2 cuts what tensor parallel has cut already: pieces are joined along the outermost mesh dimension first."""
    shape, _, splits, _ = parts[0]
    found = {tuple(coordinate): part for _, coordinate, _, part in parts}
    if len(parts) > len(found):  # a replica elsewhere, or a part of the mesh that we do not see
        for _, coordinate, _, part in parts:
            assert torch.equal(found[tuple(coordinate)], part), "replicas differ"
    for size, dim in zip(shape, splits, strict=True):
        rest = {coordinate[1:] for coordinate in found}
        rows = {r: [found[(i, *r)] for i in range(size)] for r in rest}
        found = {r: torch.cat(row, dim) if dim >= 0 else row[0] for r, row in rows.items()}
    return found[()].contiguous()


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank = args, dist.get_rank()
        world_size = dist.get_world_size()
        tensor_parallel = args.tensor_parallel or (2 if world_size % 2 == 0 else 1)
        self.spread = Spread(args.kind, world_size, tensor_parallel)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.spread.optimizer, 3, 0.8)
        self.loader = mx.data.ResumableLoader(
            Sentences(args.size),
            batch_size=args.batch_size,
            shuffle=True,
            seed=3,
            rank=self.spread.data_rank,
            world_size=self.spread.data_size,
        )
        self.window, rest = divmod(SAMPLES_PER_UPDATE, args.batch_size * self.spread.data_size)
        assert not rest
        self.guard = mx.Guard(
            model=self.spread.wrapped,
            optimizer=self.spread.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.loader,
            directory=args.directory,
        )

    def run(self) -> None:
        guard, args = self.guard, self.args
        with guard:
            say(f"READY {self.rank} {os.getpid()} {guard.resumed_from_step}")
            if guard.resumed_from_step is not None:
                self.tell_state(guard.resumed_from_step)
            for epoch in guard.epochs(1000):
                seen, losses = [], []
                for tokens, index in self.loader:
                    losses.append(self.backward(tokens))
                    seen += index.tolist()
                    if len(losses) == self.window:
                        self.update(epoch, losses, seen)
                        seen, losses = [], []
                    if guard.position.step >= args.steps:
                        break
                if guard.position.step >= args.steps:
                    break
            self.tell_state(guard.position.step)
        say(f"DONE {self.rank}")

    def backward(self, tokens: torch.Tensor) -> float:
        logits = self.spread.wrapped(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / self.window).backward()
        return loss.item()

    def update(self, epoch: int, losses: list[float], seen: list[int]) -> None:
        guard, args, step = self.guard, self.args, self.guard.position.step + 1
        self.spread.optimizer.step()
        self.spread.optimizer.zero_grad()
        self.scheduler.step()
        loss = torch.tensor(sum(losses) / len(losses), dtype=torch.float64)
        dist.all_reduce(loss)
        is_played_on = guard.stopper.save.path is not None  # the resumed run makes this step
        if self.rank == 0 and not is_played_on:
            say(f"LOSS {step} {loss.item() / dist.get_world_size()!r}")
        if self.spread.speaks and not is_played_on:
            say(f"SEEN {epoch} {','.join(map(str, seen))} step {step}")
        if step in (*args.save_at, args.hold_at + 1):  # a job that is stopped while it is held does one step more
            self.tell_state(step)
        guard.step_end()
        if step in args.save_at:
            guard.save()
        if step == args.hold_at:
            hold(guard, self.rank)

    def tell_state(self, step: int) -> None:
        digest = self.spread.digest()
        if self.rank == 0:
            say(f"STATE {step} {digest}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--size", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=0)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--save-at", type=int, nargs="*", default=())
    return parser.parse_args()


def train(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(args).run()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    arguments = parse()
    sys.exit(run_ranks(arguments.ranks, lambda: train(arguments)) if arguments.ranks else train(arguments))
