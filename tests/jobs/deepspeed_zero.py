"""Three steps with DeepSpeed's ZeRO, and its checkpoint: ``deepspeed_zero.py STAGE fp32|bf16 FOLDER``.

Two parameter groups of odd sizes in round robin, small groups of stage 3, a tied weight, frozen parameters, buffers.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import nn

STAGE, PRECISION, FOLDER = sys.argv[1:]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(11, 6), nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7) if PRECISION == "fp32" else nn.LayerNorm(7)
        self.frozen, self.back, self.scale = nn.Linear(7, 3), nn.Linear(3, 6), nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(self.embedding(x))) * self.scale
        found: torch.Tensor = self.head(self.back(self.frozen(hidden)))
        return found


deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = Net()
trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
groups = [
    {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
]
zero = {"stage": int(STAGE), "overlap_comm": False, "round_robin_gradients": STAGE != "3", "sub_group_size": 20}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": int(STAGE),
        "overlap_comm": False,
        "round_robin_gradients": STAGE != "3",
        "sub_group_size": 20,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": PRECISION == "bf16"},
}
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
torch.manual_seed(deepspeed.comm.get_rank())
for _ in range(3):
    inputs, targets = torch.randint(0, 11, (4,)), torch.randint(0, 11, (4,))
    engine.backward(nn.functional.cross_entropy(engine(inputs).float(), targets))
    engine.step()
engine.save_checkpoint(FOLDER, tag=f"global_step{engine.global_steps}")
torch.distributed.destroy_process_group()
