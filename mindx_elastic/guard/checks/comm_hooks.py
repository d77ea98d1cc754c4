"""State of torch's own communication hooks of DDP (PowerSGD's error feedback, local SGD's counter): in no module, and
never saved unless it is named in `stateful`.

What a hook of the program's own has, in its state, in an object or in its closure, is for the comparison of the next
resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindx_elastic.capture.ddp_order import DdpModules
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["refuse_unnamed_hook_states"]

_KNOWN = ("PowerSGDState", "PostLocalSGDState")
"""By name: importing them takes long."""


def refuse_unnamed_hook_states(targets: Mapping[str, Any], ddp: DdpModules, unmanaged: Unmanaged) -> None:
    """Training thread, when the guard is entered. Raises UnmanagedStateError."""
    named = {id(target) for target in targets.values()}
    for place, module in ddp:
        for _, state in module._comm_hooks:
            if id(state) in named or not any(kind.__name__ in _KNOWN for kind in type(state).__mro__):
                continue
            kind = type(state).__name__
            unmanaged.certain(
                f"{place}: its DDP has a communication hook with state ({kind}) that is not named",
                f'Name that object: Guard(stateful={{"comm_hook": state}}, ...), with the {kind} that was given to '
                "register_comm_hook",
            )
