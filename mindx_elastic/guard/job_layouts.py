"""Collects the job's parallel strategy at the start: from the guard's objects and the layouts that the user gives."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.layouts import ParallelSetup
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import LaidOut, Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.replicas import DdpModules, ignored_parameters, replica_ranks
from mindx_elastic.resume.restore import Target, put_strategy, read_strategies

__all__ = ["ByHand", "JobLayouts", "WholeShapes", "own_target", "parallel_setup_of"]

_WHOLE = "strategy"


def parallel_setup_of(
    targets: Mapping[str, Any],
    ranks: RankInfo,
    layouts: Mapping[str, Layout] | None,
    ddp: DdpModules,
) -> ParallelSetup:
    """This rank's place in the parallel job. Raises UsageError for malformed layouts."""
    return ParallelSetup(
        ranks.rank,
        ranks.world_size,
        replica_ranks(targets, ddp),
        ignored_parameters(targets, ddp),
        ByHand(layouts or {}, ranks),
    )


class ByHand:
    """The layouts that the user has given: pattern -> `Layout`. The whole shapes of uneven shards are known when all
    ranks have reported theirs (`learn`); until then shards are taken to be equal."""

    def __init__(self, layouts: Mapping[str, Layout], ranks: RankInfo) -> None:
        """Raises UsageError for malformed layouts."""
        self._layouts, self._rank = layouts, ranks.rank
        self._whole: dict[str, tuple[int, ...]] = {}
        for pattern, layout in layouts.items():
            if not isinstance(layout, Layout) or not isinstance(pattern, str):
                raise UsageError(f"layouts[{pattern!r}]={layout!r}: give a pattern of names and a Layout")
            if max(layout.ranks) >= ranks.world_size:
                raise UsageError(f"layouts[{pattern!r}] names rank {max(layout.ranks)}; the job has {ranks.world_size}")

    def __call__(self, place: str, shape: tuple[int, ...]) -> LaidOut | None:
        layout = self._layout_of(place, self._rank)
        if layout is None:
            return None
        whole = self._whole.get(place)
        return LaidOut(layout, whole if whole is not None else layout.global_shape(shape))

    def _layout_of(self, place: str, rank: int) -> Layout | None:
        for pattern, layout in self._layouts.items():
            if fnmatch.fnmatchcase(place, pattern) and rank in layout:
                return layout
        return None

    def parts(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Layout, tuple[int, ...]]]:
        """Those of `shapes`, the shapes of this rank's parameters, that the user describes, with their layouts."""
        found = {place: (self._layout_of(place, self._rank), shape) for place, shape in shapes.items()}
        return {place: (layout, shape) for place, (layout, shape) in found.items() if layout is not None}

    def learn(self, whole: Mapping[tuple[str, Layout], tuple[int, ...]]) -> None:
        """Take over the whole shapes of tensors, as computed from the shards of all ranks."""
        for (place, layout), shape in whole.items():
            if layout == self._layout_of(place, self._rank):
                self._whole[place] = shape


class WholeShapes(Part):
    """Whole shapes of the tensors that the user describes: shards along a dimension may be uneven, so add them up."""

    name = "shapes"

    def __init__(self, collector: Collector) -> None:
        by_hand = collector.layouts.setup.by_hand
        self._by_hand = by_hand if isinstance(by_hand, ByHand) else None
        self._parts = {} if self._by_hand is None else self._by_hand.parts(collector.layouts.shapes())

    def say(self) -> Any:
        layouts = list(dict.fromkeys(layout for layout, _ in self._parts.values()))
        parts = [[place, layouts.index(layout), list(shape)] for place, (layout, shape) in self._parts.items()]
        return [[layout.to_json() for layout in layouts], parts] if parts else None

    def merge(self, said: Sequence[Any]) -> Merged:
        parts: dict[tuple[str, Layout], dict[int, tuple[int, ...]]] = {}
        for rank, each in enumerate(said):
            layouts = [Layout.from_json(content) for content in each[0]] if each else []
            for place, number, shape in each[1] if each else ():
                layout = layouts[int(number)]
                if rank in layout:
                    by_shard = parts.setdefault((str(place), layout), {})
                    by_shard[layout.shard_of(rank)] = tuple(int(n) for n in shape)
        whole = [
            [place, layout.to_json(), list(layout.whole_shape(next(iter(by_shard.values())), by_shard))]
            for (place, layout), by_shard in parts.items()
            if len(by_shard) == layout.num_shards
        ]
        return Merged(whole)

    def hear(self, answer: Answer) -> None:
        if self._by_hand is not None:
            self._by_hand.learn(
                {
                    (str(place), Layout.from_json(layout)): tuple(int(n) for n in shape)
                    for place, layout, shape in answer.common
                }
            )


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
        strategy = self.target.strategy = Strategy(self._world_size, tuple(specs))
        # Files do not record layouts that are only assumed for other ranks.
        samples = [known[0] for group in strategy.classes if (known := [s for s in group.tensors if not s.assumed])]
        more = {_WHOLE: strategy.to_json()} if self._publish() else {}
        return Merged(Strategy(self._world_size, tuple(samples)).to_json(), more=more)

    def hear(self, answer: Answer) -> None:
        self._on_known(Strategy.from_json(answer.common).tensors)
        self._more = answer.more

    def whole_strategy(self) -> Strategy:
        """The strategy of all ranks; only if `publish` is true. Main thread, after the meeting."""
        (content,) = self._more([_WHOLE])
        return Strategy.from_json(content)


def own_target(collector: Collector, ranks: RankInfo) -> Target:
    """What this rank holds; call it when the whole shapes are known. Raises UsageError when a layout does not fit its
    tensors."""
    shapes = {place: ("", shape) for place, shape in collector.layouts.shapes().items()}
    own = collector.layouts.record().strategy(shapes)
    strategy = Strategy(ranks.world_size, (*own.tensors, *collector.layouts.markers()))
    return Target(strategy, collector.layouts.blueprint())
