"""Whether DDP broadcasts a module's buffers from rank 0 in its next forward: state of DDP that no ``state_dict`` has.

It does so by default, but not after a forward whose gradients it does not reduce: one under ``no_sync()``, or without
gradients, as in an evaluation. In a loop that is all in ``no_sync()``, because the program averages the gradients
itself, each rank so keeps its own batch norm statistics; a new process would broadcast rank 0's once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn.parallel import DistributedDataParallel

__all__ = ["BufferBroadcasts"]


class BufferBroadcasts:
    """The broadcast flags of the DDP modules of a job, by their paths. All ranks have the same state here, for a
    broadcast takes all."""

    def __init__(self, modules: Sequence[tuple[str, DistributedDataParallel]] = ()) -> None:
        self._modules = [(name, module) for name, module in modules if module.broadcast_buffers]
        self.are_used = bool(self._modules)
        self.seen = self.look()
        """As at the last boundary."""

    def look(self) -> list[bool]:
        """As it is now."""
        return [module.require_forward_param_sync for _, module in self._modules]

    def copy(self) -> None:
        """This is a boundary. Only where they `are_used`."""
        self.seen = self.look()

    def put_back(self, seen: Sequence[bool]) -> None:
        """Let it be as `look` has given it."""
        for (_, module), flag in zip(self._modules, seen, strict=True):
            module.require_forward_param_sync = flag

    def state(self) -> dict[str, bool]:
        """As at the last boundary: the modules of which the next forward broadcasts nothing."""
        return {name: False for (name, _), flag in zip(self._modules, self.seen, strict=True) if not flag}

    def load(self, state: Mapping[str, bool]) -> None:
        for name, module in self._modules:
            module.require_forward_param_sync = state.get(name, True)
        self.copy()
