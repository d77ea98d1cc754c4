"""Finds what the ranks should have alike and have not: the weights of a replicated job, the lengths of the loaders.

Where weights differ, each rank may get another's: behind its death, or where its file is lost. DDP makes the weights
that it wraps the same on all ranks. A copy that a program makes before that, with another seed on each rank (an average
of the weights, as DeiT has it), begins with each rank's own and stays another. The files of a usual stop have all of
them, and small ones are in each rank's memory (`capture.rank_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent
from mindx_elastic.capture.weight_samples import WeightSamples
from mindx_elastic.data.position import num_batches
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["LoaderLengthsPart", "UnevenModules"]


class UnevenModules(Part):
    """Some elements of each parameter are compared, when the state has been loaded."""

    name = "uneven_modules"

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._names: list[str] = []

    def say(self) -> Any:
        return WeightSamples(self._collector).digests()

    def merge(self, said: Sequence[Any]) -> Merged:
        return Merged(sorted(str(name) for name in said[0] if len({each.get(name) for each in said}) > 1))

    def hear(self, answer: Answer) -> None:
        self._names = [str(name) for name in answer.common]

    def tell(self, unmanaged: Unmanaged) -> None:
        kinds: Mapping[str, Any] = self._collector.components
        kept = self._collector.rank_weights
        for name in self._names:
            if kept is not None and name in kept:
                continue
            component = kinds.get(name)
            kind = type(component.module).__name__ if isinstance(component, ModuleComponent) else "?"
            unmanaged.risk(
                f'the weights of module "{name}" ({kind}) are not the same on all ranks, and a rank that is killed '
                "gets those of another rank",
                "Copy it from the module behind DDP, which gives all ranks the same weights "
                "(copy.deepcopy(ddp.module)), and update it on all ranks alike; or --snapshot-every 1 keeps rank 0's",
            )


class LoaderLengthsPart(Part):
    """Whether the ranks' loaders have equally many batches in an epoch, as far as the loaders know."""

    name = "loader_lengths"

    def __init__(self, targets: Mapping[str, Any]) -> None:
        followed = {name: target.loader for name, target in targets.items() if isinstance(target, FollowedLoader)}
        self._own = {name: num_batches(loader) for name, loader in followed.items()}
        self.uneven = ""
        """The first loader of which the ranks have different numbers of batches, in words; empty: there is none."""

    def say(self) -> Any:
        return self._own

    def merge(self, said: Sequence[Any]) -> Merged:
        for name in said[0]:
            counts = [int(each.get(name, 0)) for each in said]
            low, high = min(counts), max(counts)
            if 0 < low < high:
                return Merged(
                    f"{name} has {low} batches on rank {counts.index(low)} and {high} on rank {counts.index(high)}"
                )
        return Merged("")

    def hear(self, answer: Answer) -> None:
        self.uneven = str(answer.common)
