"""A small world for the loops that learn by trying: its state and its own generator belong to the training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["Walk"]


class Walk:
    """Walk to +3 on a line; the wind is drawn from a generator of its own."""

    def __init__(self) -> None:
        self.wind = np.random.default_rng(2)
        self.reset()

    def reset(self) -> torch.Tensor:
        self.at, self.time = 0.0, 0
        return self.look()

    def look(self) -> torch.Tensor:
        return torch.tensor([self.at, self.time / 10])

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        """What is seen next, the reward, and whether the episode is over."""
        self.at += (1 if action else -1) + self.wind.normal(0, 0.3)
        self.time += 1
        return self.look(), -abs(3 - self.at), self.time >= 10

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "time": self.time, "wind": self.wind.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.time = state["at"], state["time"]
        self.wind.bit_generator.state = state["wind"]
