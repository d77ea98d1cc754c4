"""What a checkpoint of this job holds: all components, the random generators and the position, at one boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from mindx_elastic.capture.components import Component, ModuleComponent, component_for
from mindx_elastic.capture.position import Position
from mindx_elastic.capture.rng import capture_rng, pack_rng
from mindx_elastic.capture.targets import RESERVED_NAMES
from mindx_elastic.errors import MismatchError

__all__ = ["Collector"]


class Collector:
    """Gathers the state of named `targets`.

    `copy` belongs to the training thread inside the update gate; `state` to whoever holds the gate.
    """

    def __init__(self, targets: Mapping[str, object]) -> None:
        self.components: dict[str, Component] = {name: component_for(name, t) for name, t in targets.items()}
        self.position = Position()
        self.gradient_order: dict[str, list[int]] = {}
        self._rng = capture_rng()
        self.boundary_event: Any = None
        """CUDA event after the boundary's last kernel; None without CUDA. See `capture.snapshot`."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Every parameter whose in-place change outside an optimizer would tear the state."""
        modules = [c for c in self.components.values() if isinstance(c, ModuleComponent)]
        return [p for module in modules for p in module.parameters]

    def copy(self, position: Position) -> None:
        """Copy all volatile state: this is the boundary `position`."""
        for component in self.components.values():
            component.copy()
        self._rng = capture_rng(self._rng)
        self.position = position
        self._mark_devices()

    def state(self) -> dict[str, Any]:
        """The boundary's whole state; tensors of the stable part are the live ones, not copies."""
        state: dict[str, Any] = {name: component.state() for name, component in self.components.items()}
        state["rng"] = pack_rng(self._rng)
        state["progress"] = asdict(self.position)
        state["gradient_order"] = self.gradient_order
        return state

    def layout(self) -> dict[str, Any]:
        """Where this rank's parts of sharded tensors lie; empty when nothing is sharded."""
        modules = [c for c in self.components.values() if isinstance(c, ModuleComponent)]
        return {name: place for module in modules for name, place in module.layout().items()}

    def load(self, state: dict[str, Any]) -> list[str]:
        """Put a state back, everything but the random generators. Returns notes on what did not match but may differ.

        Raises MismatchError when a part is missing or does not fit; training must not start after it.
        """
        missing = [name for name in self.components if name not in state]
        if missing:
            raise MismatchError(
                f"the checkpoint holds nothing for {', '.join(missing)} (it has {', '.join(sorted(state))}); use the "
                'same objects as the run that wrote it, or start anew with resume="never" in another directory'
            )
        for name, component in self.components.items():
            component.load(state[name])
        self.position = Position(**state["progress"])
        self.gradient_order = {key: list(order) for key, order in state["gradient_order"].items()}
        extra = [name for name in state if name not in self.components and name not in RESERVED_NAMES]
        return [f"the checkpoint also holds {name}, which this job does not use" for name in extra]

    def _mark_devices(self) -> None:
        # The kernels of this boundary's update may still run. An event on the training stream lets a reader in another
        # thread wait for exactly them, and not for the next step's (perhaps hung) kernels.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.boundary_event = torch.cuda.Event()
            self.boundary_event.record()
