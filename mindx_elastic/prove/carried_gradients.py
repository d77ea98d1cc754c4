"""Finds gradients that go on from step to step: a backward adds to what an earlier step has left in them.

No checkpoint has the gradients of a boundary. A program that clears them only after its update, and then has another
backward (of the generator, through the discriminator), or clears them in no step, trains on with other ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.core.printable import listed

__all__ = ["CarriedGradients"]


class CarriedGradients:
    """One per entered guard. Training thread, but for the hooks, which run in autograd's threads."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._handles: dict[str, tuple[Any, Any]] = {}
        self._before: dict[str, torch.Tensor | None] = {}
        """Whether a gradient had anything in it when it was computed next. Read later: that waits for a device."""
        self._added: list[str] = []

    def watch(self) -> None:
        """At a boundary: look at the next backward that adds to a gradient which is there now."""
        places = self._collector.places()
        for parameter in self._collector.parameters:
            place = places.get(id(parameter))
            if place is not None and parameter.grad is not None and parameter.requires_grad:
                # By a reference that keeps nothing: parameters and gradients are the program's to free. A hook before
                # is called by autograd.grad() as well, which adds to nothing.
                before = parameter.register_hook(partial(self._note, place, ref(parameter)))
                added = parameter.register_post_accumulate_grad_hook(partial(self._note_added, place))
                self._handles[place] = before, added

    def _note(self, place: str, parameter: ref[torch.Tensor], _computed: torch.Tensor) -> None:
        gradient: torch.Tensor | None = getattr(parameter(), "grad", None)
        self._before[place] = None
        if gradient is not None and gradient.layout is torch.strided:
            self._before[place] = local_part(gradient).any()

    def _note_added(self, place: str, _parameter: torch.Tensor) -> None:
        self._added.append(place)
        self._unhook(place)

    def _unhook(self, place: str) -> None:
        for handle in self._handles.pop(place, ()):
            handle.remove()

    def found(self) -> list[str]:
        """What has been seen since `watch`, which ends here, as one text or none."""
        for place in list(self._handles):
            self._unhook(place)
        before = {place: self._before.get(place) for place in self._added}
        carried = [place for place, something in before.items() if something is not None and bool(something)]
        what = f"gradients of {listed(carried, 1)}" if carried else ""
        return [f"{what} (the next step adds to them: call zero_grad() before backward())"] if what else []
