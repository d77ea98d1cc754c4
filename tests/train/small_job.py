"""A model small enough to train in milliseconds, with dropout and BatchNorm so that nothing random is left out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mindx_elastic.data import ResumableLoader
from mindx_elastic.train import Model


class Points(Dataset[Any]):
    """24 points in 4 dimensions, 3 classes, with random noise as augmentation."""

    def __init__(self, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = torch.randint(3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(4), self.y[index]


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def make_loader(**changes: Any) -> ResumableLoader:
    return ResumableLoader(Points(), **{"batch_size": 4, "shuffle": True, "seed": 3, **changes})


def make_model(**changes: Any) -> Model:
    """Seeds everything; the same arguments give the same training."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    network = changes.pop("network", None) or make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    arguments = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": optimizer, "lr_scheduler": scheduler, "device": "cpu"}
    kind: type[Model] = changes.pop("kind", Model)
    return kind(network, **{**arguments, **changes})


def weights(model: Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.bare_network.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
