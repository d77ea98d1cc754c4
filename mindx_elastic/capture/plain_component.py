"""Any object with ``state_dict`` and ``load_state_dict``, its own or an adapter's: the whole state is copied at every
boundary."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mindx_elastic.capture.adapters import Adapter
from mindx_elastic.capture.copying import copy_tree

__all__ = ["PlainComponent", "Stateful"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can give its state and take it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class PlainComponent:
    """The whole state is copied at every boundary. `adapter`: for a target without the two methods."""

    KEPT_IN = "_copy"
    """The attribute with its copied state."""

    def __init__(self, name: str, target: Any, adapter: Adapter | None = None) -> None:
        self.name = name
        self.target = target
        self._stateful: Stateful = adapter or target
        self.is_stream = adapter is not None and adapter.is_stream
        """A random generator: see `adapters.Adapter`."""
        self.copy()

    def copy(self) -> None:
        self._copy = copy_tree(self._stateful.state_dict())  # `look`, without a call

    def look(self) -> Any:
        """The state as it is now."""
        return copy_tree(self._stateful.state_dict())

    def state(self) -> Any:
        return self._copy

    def load(self, state: Any) -> None:
        self.put_back(state)
        self.copy()

    def put_back(self, state: Any) -> None:
        """Make the target as `state` says, which `look` or `state` has given."""
        self._stateful.load_state_dict(copy_tree(state))
