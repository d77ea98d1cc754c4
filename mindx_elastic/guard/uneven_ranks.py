"""Finds weights of a replicated job that the ranks should have alike and have not.

Where they differ, each rank may get another's: after its death, or where its file is lost. DDP makes the weights
that it wraps the same on all ranks. A copy that a program makes before that, with another seed on each rank (an average
of the weights, as DeiT has it), begins with each rank's own and stays another. The files of a usual stop have all of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent
from mindx_elastic.capture.weight_samples import WeightSamples
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["UnevenModules"]


class UnevenModules(Part):
    """Some elements of each parameter are compared, when the state has been loaded."""

    name = "uneven_modules"

    def __init__(self, collector: Collector, unmanaged: Unmanaged) -> None:
        self._collector, self._unmanaged = collector, unmanaged

    def say(self) -> Any:
        return WeightSamples(self._collector).digests()

    def merge(self, said: Sequence[Any]) -> Merged:
        return Merged(sorted(str(name) for name in said[0] if len({each.get(name) for each in said}) > 1))

    def hear(self, answer: Answer) -> None:
        kinds: Mapping[str, Any] = self._collector.components
        for name in map(str, answer.common):
            component = kinds.get(name)
            kind = type(component.module).__name__ if isinstance(component, ModuleComponent) else "?"
            self._unmanaged.risk(
                f'the weights of module "{name}" ({kind}) are not the same on all ranks, and a rank that is killed '
                "gets those of another rank",
                "Copy it from the module inside DDP, which gives all ranks the same weights "
                "(copy.deepcopy(ddp.module)), and update it on all ranks alike; or --snapshot-every 1 keeps rank 0's",
            )
