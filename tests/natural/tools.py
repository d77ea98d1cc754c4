"""Data for the loops, and the line that each of them ends with."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

__all__ = ["Noisy", "done", "gpu", "mlp", "points", "text"]


def points(size: int = 30, width: int = 8, classes: int = 3, seed: int = 1) -> TensorDataset:
    """Vectors and their classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, width, generator=generator)
    return TensorDataset(x, x[:, :classes].argmax(1))


class Noisy(Dataset[Any]):
    """The same, with noise from every global stream."""

    def __init__(self, size: int = 30) -> None:
        self.data = points(size)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand()), y


def text(length: int = 400, symbols: int = 11) -> torch.Tensor:
    """A text of numbers with some structure to learn."""
    numbers = torch.arange(length)
    return (numbers * numbers // 7 + numbers) % symbols


def mlp(width: int = 8, hidden: int = 16, out: int = 3, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, out)
    )


def gpu() -> torch.device:
    """Where the loops in ``loops/on_gpu/`` train, with the same arithmetic each time. Ranks share the first device, and
    each tells NCCL that it is on a machine of its own. Without a device the CPU, for the loops that do not need one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.update(NCCL_HOSTID=f"rank-{os.environ.get('RANK', '0')}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def done(*parts: Any) -> None:
    """Print the digest of modules, tensors and numbers: what two runs are compared by."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, nn.Module):
            for name, held in sorted(part.state_dict().items()):
                value = held.full_tensor() if hasattr(held, "full_tensor") else held
                digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(part, torch.Tensor):
            digest.update(part.detach().cpu().contiguous().numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    sys.stdout.flush()
    os.write(1, f"DONE {digest.hexdigest()}\n".encode())  # one write: several ranks share the pipe
