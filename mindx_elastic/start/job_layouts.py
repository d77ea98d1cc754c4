"""Collects the job's parallel strategy at the start: from the guard's objects and the layouts that the user gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.strategy import MARKER, Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.start.restore import Target, put_strategy, read_strategies

__all__ = ["JobLayouts", "own_target"]

_WHOLE = "strategy"


class JobLayouts(Part):
    """The layouts of all ranks together: the target of a plan, and what each file records of the whole job."""

    name = "layouts"

    def __init__(
        self,
        exchange: Exchange,
        target: Target,
        on_known: Callable[[Sequence[TensorSpec]], None],
        *,
        publish: Callable[[], bool] = lambda: False,
    ) -> None:
        """`target`: what this rank holds; see `own_target`. `on_known`: called with one tensor of every layout that a
        rank of the job has. `publish`: on rank 0, whether some rank will ask for `whole_strategy`."""
        self._exchange, self._on_known, self._publish = exchange, on_known, publish
        self.target, self._world_size = target, target.own.world_size
        self._pieces = put_strategy(exchange, self.target.own)

    def say(self) -> Any:
        return self._pieces

    def merge(self, said: Sequence[Any]) -> Merged:
        strategies = [self.target.own]
        if len(said) > 1:
            strategies = read_strategies(self._exchange, [self._world_size] * len(said), said)
        specs = dict.fromkeys([spec for each in {id(s): s for s in strategies}.values() for spec in each.tensors])
        shapes: dict[tuple[str, Layout], tuple[int, ...]] = {}
        for spec in [spec for spec in specs if not spec.assumed]:
            if (shape := shapes.setdefault((spec.name, spec.layout), spec.shape)) != spec.shape:
                raise UsageError(
                    f"{spec.name}: the ranks' parts make tensors of {list(shape)} and {list(spec.shape)}. Parts of a "
                    "layout given by hand are equal: pad the tensor, or make it a DTensor"
                )
        strategy = self.target.strategy = Strategy(self._world_size, tuple(specs))
        # Files do not record layouts that are only assumed for other ranks.
        samples = [known[0] for group in strategy.classes if (known := [s for s in group.tensors if not s.assumed])]
        samples += _held_alone(strategies)
        more = {_WHOLE: strategy.to_json()} if self._publish() else {}
        return Merged(Strategy(self._world_size, tuple(samples)).to_json(), more=more)

    def hear(self, answer: Answer) -> None:
        self._on_known(Strategy.from_json(answer.common).tensors)
        self._more = answer.more

    def whole_strategy(self) -> Strategy:
        """The strategy of all ranks; only if `publish` is true. Main thread, after the meeting."""
        (content,) = self._more([_WHOLE])
        return Strategy.from_json(content)


def _held_alone(strategies: Sequence[Strategy]) -> list[TensorSpec]:
    """Markers of tensors that only some ranks hold, though by their layout others do (a module that rank 0 alone has
    made): one for each group of such ranks. `strategies`: of each rank."""
    ranks_of: dict[int, list[int]] = {}
    for rank, strategy in enumerate(strategies):  # of replicas the same object
        ranks_of.setdefault(id(strategy), []).append(rank)
    holders: dict[str, set[int]] = {}
    distinct = {id(strategy): strategy for strategy in strategies}
    for number, strategy in distinct.items():
        for name in strategy.by_name:
            holders.setdefault(name, set()).update(ranks_of[number])
    found: dict[tuple[int, ...], str] = {}
    for spec in [spec for strategy in distinct.values() for spec in strategy.tensors if not spec.is_marker]:
        if not holders[spec.name].issuperset(spec.layout.ranks):
            found.setdefault(tuple(sorted(holders[spec.name])), spec.name)
    return [TensorSpec(f"{MARKER}{name}", (), Layout((len(r),), (REPLICATE,), r)) for r, name in found.items()]


def own_target(collector: Collector, ranks: RankInfo) -> Target:
    """What this rank holds; call it when the whole shapes are known. Raises UsageError when a layout does not fit its
    tensors."""
    shapes = {place: ("", shape) for place, shape in collector.layouts.shapes().items()}
    own = collector.layouts.record().strategy(shapes)
    strategy = Strategy(ranks.world_size, (*own.tensors, *collector.layouts.markers()))
    return Target(strategy, collector.layouts.blueprint())
