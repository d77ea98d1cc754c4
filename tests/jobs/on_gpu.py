"""A training on one GPU, alone or with several ranks over NCCL, with faults at given places (see ``in_place.py``).

Several ranks share the machine's first GPU: each tells NCCL that it is on a machine of its own, so that NCCL does not
refuse them, and its data goes over the loopback interface.

Prints ``READY rank pid resumed_from``, ``SEEN epoch index,... rank step``, ``SYNC rank step count where`` for the steps
in which the guard has waited for the device, and ``DONE rank sha256 step``.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["NCCL_HOSTID"] = f"rank-{os.environ.get('RANK', '0')}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.jobs.in_place import Training, make_parser, plain
from tests.jobs.kit import say

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Residual(nn.Module):
    """One of many small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.tanh(self.linear(x))


class OnGpu(Training):
    """On the first GPU; `--megabytes` are of further weights, which every step changes."""

    device = "cuda"

    def meet(self) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size > 1:
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0))

    def make_network(self, *more: nn.Module) -> Any:
        return super().make_network(*more, *(Residual() for _ in range(self.args.depth))).cuda()

    def make_optimizer(self) -> Any:
        foreach = False if self.args.plain_optimizer else None
        return torch.optim.AdamW(self.network.parameters(), lr=1e-2, foreach=foreach)

    def wrap(self, network: Any) -> Any:
        bucket = 0.05 if self.args.depth else 0.002
        if self.args.shard == "fsdp":
            fully_shard(network)
        elif self.world_size > 1:
            network = nn.parallel.DistributedDataParallel(network, device_ids=[0], bucket_cap_mb=bucket)
        self.compiled = torch.compile(network) if self.args.compile == "model" else network
        return network

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y, kind = x.cuda(non_blocking=True), y.cuda(non_blocking=True), PRECISIONS[self.args.precision]
        with torch.autocast("cuda", kind, enabled=kind is not torch.float32):
            loss: torch.Tensor = nn.functional.cross_entropy(self.compiled(x).float(), y)
            if self.args.megabytes:
                loss = loss + self.network.get_parameter("bulk").sub(1e-3).square().mean()
        self.faults.at(self.step, "forward")
        return loss

    def end(self, **told: torch.Tensor) -> None:
        if not self.args.tell_syncs:
            super().end()
            return
        step = self.step
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # the guard's own share of the step should not wait for the device
            try:
                super().end()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [f"{Path(w.filename).name}:{w.lineno}" for w in found if "synchroniz" in str(w.message)]
        if waits:
            say(f"SYNC {self.rank} {step} {len(waits)} {' '.join(sorted(set(waits)))}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    parser = make_parser()
    parser.set_defaults(epochs=3)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--depth", type=int, default=0, help="further layers: their kernels fill the device's queue")
    parser.add_argument("--plain-optimizer", action="store_true", help="a dozen kernels for each parameter")
    parser.add_argument("--tell-syncs", action="store_true")
    args = parser.parse_args()
    args.amp = args.precision == "fp16"
    OnGpu(args).run(plain)
    if dist.is_initialized():
        dist.destroy_process_group()
