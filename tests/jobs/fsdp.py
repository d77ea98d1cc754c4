"""A training job for the system tests: FSDP2 on CPU, each rank saving its own shards. Same lines as ``loop.py``.

Each rank draws random numbers of its own, so that another one's file will not do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mindx_elastic as mx
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.mirror import nearby
from mindx_elastic.mirror.wire import Channel
from mindx_elastic.persist import writer
from tests.jobs.kit import Every, kill_here, say, wait_for
from tests.jobs.loop import hold, kill_in_snapshot

STEPS = 12


def local_hash(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in network.parameters():
        assert isinstance(parameter, DTensor)
        digest.update(parameter.to_local().detach().numpy().tobytes())
    return digest.hexdigest()


def kill_in_save() -> None:
    """Die in the first save, before the file gets its name."""

    def killed(*_: object, **__: object) -> None:
        kill_here("in written")

    mock.patch.object(writer, "publish", killed).start()


def step_in(header: bytes) -> int:
    info = json.loads(json.loads(header[8:])["__metadata__"]["mindx.checkpoint"])
    return int(info["step"])


def send_half(rank: int, step: int) -> None:
    """The copy of `step` is sent up to its middle, and stays there."""
    send_file = Channel.send_file

    def send(self: Channel, fd: int, size: int, *, header: bytes = b"", **more: Any) -> None:
        if not header or step_in(header) != step:
            return send_file(self, fd, size, header=header, **more)
        self._send(header + os.pread(fd, (size - len(header)) // 2, len(header)))
        say(f"HALF {rank} {step}")
        return self.wait_for_end()

    mock.patch.object(Channel, "send_file", send).start()


def receive_late(rank: int, step: int, guard: mx.Guard, gates: Path) -> None:
    """From `step` of this rank on a copy is received when there is a file ``go``."""
    receive = nearby.receive

    def hang(channel: Channel, arena: RankArena, *args: Any, ready: Callable[[], None], **more: Any) -> int:
        if guard.position.step >= step and not (gates / "go").exists():
            say(f"HANGS {rank}")
            wait_for(gates / "go")
        return receive(channel, arena, *args, ready=ready, **more)

    mock.patch.object(nearby, "receive", hang).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--gates", type=Path, help="wait behind every third step for a file of its number in there")
    parser.add_argument("--half-a-copy", help="RANK:STEP, whose copy for another node ends in the middle")
    parser.add_argument("--hanging-copies", help="RANK:STEP, which receives the others' copies from there on when let")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=0, help="a periodic save every so many steps")
    parser.add_argument("--freeze-at", type=int, default=-1, help="freeze the first layer, which keeps its gradient")
    parser.add_argument("--kill-in-snapshot", default="")
    parser.add_argument("--kill-in-save", type=int, default=-1, help="the rank")
    parser.add_argument(
        "--tft", action="store_true", help="save as TFTRegister does, with its wrapper around the optimizer"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if args.kill_in_snapshot:
        kill_in_snapshot(args.kill_in_snapshot, rank)
    if rank == args.kill_in_save:
        kill_in_save()
    if args.half_a_copy and args.half_a_copy.startswith(f"{rank}:"):
        send_half(rank, int(args.half_a_copy.partition(":")[2]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    network = nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.Dropout(0.1), nn.Linear(33, 5))  # 33 rows: uneven
    fully_shard(network[0], mesh=mesh)
    fully_shard(network, mesh=mesh)
    torch.manual_seed(rank)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    policies, periodic = None, [Every(args.directory, args.every, keep_max=2)] if args.every else []
    if args.tft:
        optimizer = mx.OptTFTWrapper(optimizer)
        policies = mx.TFTRegister(0, "127.0.0.1", 30051, str(args.directory)).exit_policies()
    guard = mx.Guard(model=network, optimizer=optimizer, directory=args.directory, policies=policies, periodic=periodic)
    if args.hanging_copies and args.hanging_copies.startswith(f"{rank}:"):
        receive_late(rank, int(args.hanging_copies.partition(":")[2]), guard, args.gates)
    with guard:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for _ in guard.epochs(1):
            while guard.position.step < args.steps:
                network(torch.randn(4, 16)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=args.freeze_at < 0)
                if guard.step + 1 == args.freeze_at:
                    network[0].requires_grad_(False)
                guard.step_end()
                say(f"PASSED {rank} {guard.position.step}")
                if args.gates and guard.position.step % 3 == 0:
                    say(f"AT {rank} {guard.position.step}")
                    wait_for(args.gates / str(guard.position.step))
                if guard.position.step == args.hold_at and guard.resumed_from_step is None:
                    hold(guard, rank)
    say(f"DONE {rank} {local_hash(network)} {guard.position.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
