"""State of DDP's communication hooks (PowerSGD's error feedback, counters of local SGD): in no module, and never saved
unless it is named in `stateful`.

The state that was given to ``register_comm_hook`` is refused when it changes. What a hook has elsewhere, in an object
whose method it is or in its closure, is for the comparison of the next resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroup

from mindx_elastic.capture.adapters import adapted
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.capture.ddp_order import DdpModules
from mindx_elastic.core.looks import has_method
from mindx_elastic.errors import MindxError
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["CommHooks"]

_KNOWN = ("PowerSGDState", "PostLocalSGDState")
"""torch's own; by name, importing them takes long."""


class CommHooks:
    """The communication hooks of all DDP modules among the guard's objects. Training thread."""

    def __init__(self, targets: Mapping[str, Any], ddp: DdpModules, unmanaged: Unmanaged) -> None:
        """Raises UnmanagedStateError for a hook of torch's with state that is not named."""
        self._unmanaged = unmanaged
        self.watched: list[tuple[str, Any, Any]] = []
        """Place, state of a kind that may be none, and what it was."""
        named = {id(target) for target in targets.values()}
        for place, module in ddp:
            for _, state in module._comm_hooks:
                if state is None or isinstance(state, ProcessGroup) or id(state) in named:
                    continue
                if any(kind.__name__ in _KNOWN for kind in type(state).__mro__):
                    self._refuse(place, state)
                elif (seen := _look(state)) is not None:
                    self.watched.append((place, state, seen))

    def look(self) -> None:
        """Whether the state of a hook of the program's own changes."""
        for place, state, seen in list(self.watched):
            now = _look(state)
            if now is None or not same_tree(now, seen):
                self.watched.remove((place, state, seen))
                self._refuse(place, state)

    def _refuse(self, place: str, state: object) -> None:
        kind = type(state).__name__
        self._unmanaged.certain(
            f"{place}: its DDP has a communication hook with state ({kind}) that is not named",
            f'Name that object: Guard(stateful={{"comm_hook": state}}, ...), with the {kind} that was given to '
            "register_comm_hook",
        )


def _look(state: object) -> Any:
    """A copy of what a state holds; None where it cannot be told."""
    if has_method(state, "state_dict"):
        return None
    try:
        adapter = adapted("comm_hook", state)
        return None if adapter is None else adapter.state_dict()
    except MindxError:
        return None
