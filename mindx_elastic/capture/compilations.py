"""Notices torch.compile's code for sizes that vary.

What runs for a call depends on the calls before it. The first is compiled for its exact sizes; another size is compiled
with that size as a variable, and this newer code also runs the sizes of the first from then on. A backend may sum in
another order in either, so a process that begins with the short last batch of an epoch can differ in the last bits.
Dynamo itself says when it compiles, and keeps for each function which sizes it has seen vary. Numbers count, too: the
rate in an ``optimizer.step`` that is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Compilations"]


class Compilations:
    """The compilations of this process. Training thread."""

    def __init__(self) -> None:
        self.at_first: Callable[[], None] = lambda: None
        """Called when dynamo begins with its first compilation since `listen`."""
        self.any = False
        """Something was compiled since `listen`."""
        self.is_new = False
        """The same since `look`, where its sizes may vary."""
        self._listening = False

    def listen(self) -> None:
        """Note each compilation from now on."""
        if not self._listening and "torch._dynamo" in sys.modules:  # every optimizer imports it
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._compiles)
            self._listening = True

    def stop(self) -> None:
        """Undo `listen`."""
        if self._listening:
            from torch._dynamo.callback import callback_handler

            callback_handler.remove_start_callback(self._compiles)
            self._listening = False

    def _compiles(self, args: Any = None) -> None:
        """Dynamo begins to compile. Inside of it: looks only. ``dynamic=False`` has code for each size."""
        from torch._dynamo import config

        if not self.any:
            self.any = True
            self.at_first()
        self.is_new |= not config.assume_static_by_default or bool(config.automatic_dynamic_shapes)

    def look(self) -> list[str]:
        """Call it at a boundary. The functions with sizes that vary, if something was compiled since the last one."""
        if not self.is_new:
            return []
        self.is_new = False
        from torch._dynamo.pgo import auto_dynamic, get_code_state

        def varies(entry: Any) -> bool:
            size = entry.size
            return auto_dynamic in size if isinstance(size, tuple) else size is entry.scalar is auto_dynamic

        codes = [code for code, state in get_code_state().items() if any(map(varies, state.automatic_dynamic.values()))]
        return list(dict.fromkeys(f"{code.name} ({code.filename}:{code.firstlineno})" for code in codes))
