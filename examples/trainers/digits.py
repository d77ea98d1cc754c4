"""The handwritten digits that scikit-learn brings along, with noise drawn again for each sample and epoch."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset


class Digits(Dataset[Any]):
    """1797 images of 8 x 8, or the 297 that are held out. As ``(image, label)``, or as a dict for `Trainer`."""

    def __init__(self, *, held_out: bool = False, as_dict: bool = False) -> None:
        images, labels = load_digits(return_X_y=True)
        part = slice(1500, None) if held_out else slice(0, 1500)
        self.images = torch.tensor(images[part], dtype=torch.float32) / 16
        self.labels = torch.tensor(labels[part])
        self.noise, self.as_dict = 0.0 if held_out else 0.1, as_dict

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index] + self.noise * torch.randn(64)
        if self.as_dict:
            return {"images": image, "labels": self.labels[index]}
        return image, self.labels[index]


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 10),
    )


def digest(model: torch.nn.Module) -> str:
    """A hash of the weights, to compare runs by."""
    import hashlib

    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()[:16]
