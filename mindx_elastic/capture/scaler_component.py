"""A gradient scaler. Its scale and its counter of good steps are tensors on the device, and `state_dict` waits for the
device to read them: at a boundary they are copied on the device, and read when a file is written."""

from __future__ import annotations

from typing import Any

import torch

from mindx_elastic.capture.plain_component import PlainComponent

__all__ = ["ScalerComponent", "is_plain_scaler"]


def is_plain_scaler(target: object) -> bool:
    """Whether it is torch's gradient scaler, with torch's own state."""
    return isinstance(target, torch.amp.GradScaler) and (
        type(target).state_dict is torch.amp.GradScaler.state_dict
        and isinstance(getattr(target, "_scale", None), torch.Tensor | None)
        and isinstance(getattr(target, "_growth_tracker", None), torch.Tensor | None)
    )


class ScalerComponent(PlainComponent):
    """The component of torch's `GradScaler`."""

    def copy(self) -> None:
        self._copy = self.look()
        # Every replica's is the same, as the gradients are.
        self.is_on_device = any(isinstance(v, torch.Tensor) and not v.is_cpu for v in self._copy.values())

    @torch.no_grad()
    def look(self) -> dict[str, Any]:
        """As its `state_dict`, with copies of the tensors in place of what is in them."""
        scaler = self.target
        scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
        if scale is None or tracker is None or not scaler.is_enabled():
            return dict(scaler.state_dict())  # nothing is on a device, or not yet
        return {
            "scale": scale.detach().clone(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": tracker.detach().clone(),
        }

    def state(self) -> dict[str, Any]:
        return {key: v.cpu().item() if isinstance(v, torch.Tensor) else v for key, v in self._copy.items()}
