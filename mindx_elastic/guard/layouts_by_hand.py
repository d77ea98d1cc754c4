"""What a guard knows of the job's parallel strategy: from its objects, completed by hand, written at the start."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.layouts import ParallelSetup
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import LaidOut, Strategy
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.resuming import ignored_parameters, replica_ranks
from mindx_elastic.resume.restore import Target

__all__ = ["ByHand", "parallel_setup_of", "target_of_all"]

_START_TIMEOUT_S = 1800.0


def parallel_setup_of(
    targets: Mapping[str, Any], ranks: RankInfo, layouts: Mapping[str, Layout] | None
) -> ParallelSetup:
    """Where this rank stands among the others. Raises UsageError for layouts that are none."""
    return ParallelSetup(
        ranks.rank,
        ranks.world_size,
        replica_ranks(targets),
        ignored_parameters(targets),
        ByHand(layouts or {}, ranks),
    )


class ByHand:
    """The layouts that the user has given: pattern -> `Layout`. The whole shapes of uneven ones are worked out when all
    ranks have told their parts (`learn`); until then parts are taken to be equal."""

    def __init__(self, layouts: Mapping[str, Layout], ranks: RankInfo) -> None:
        """Raises UsageError for layouts that are none."""
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
        fitting = (layout for pattern, layout in self._layouts.items() if fnmatch.fnmatchcase(place, pattern))
        return next((layout for layout in fitting if rank in layout), None)

    def parts(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Of all `shapes` of this rank's parameters those that are described by hand."""
        return {place: shape for place, shape in shapes.items() if self._layout_of(place, self._rank) is not None}

    def learn(self, parts: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """`parts`: of every rank. The parts along a split dimension add up."""
        for place, shape in parts[self._rank].items():
            layout = self._layout_of(place, self._rank)
            assert layout is not None
            by_shard = {
                layout.shard_of(rank): tuple(each[place])
                for rank, each in enumerate(parts)
                if place in each and rank in layout
            }
            if len(by_shard) == layout.num_shards:
                self._whole[place] = layout.whole_shape(tuple(shape), by_shard)


def target_of_all(collector: Collector, ranks: RankInfo, exchange: Exchange) -> Target:
    """How all ranks together lay their tensors out. Main thread, all ranks together.

    Raises UsageError when a layout does not fit the tensors that it is for.
    """
    given, parts = collector.layouts.setup.by_hand, {}
    if isinstance(given, ByHand):
        parts = given.parts(collector.layouts.shapes())
    texts = exchange.gather("by_hand", json.dumps(parts), _START_TIMEOUT_S)
    with making_sense("the layouts given by hand"):
        told = [{str(p): [int(n) for n in shape] for p, shape in json.loads(text).items()} for text in texts]
    if isinstance(given, ByHand):
        given.learn(told)
    text = json.dumps(_own_strategy(collector, ranks).to_json(), sort_keys=True)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    digests = exchange.gather("strategy", digest, _START_TIMEOUT_S)
    sent = text if digests.index(digest) == ranks.rank else ""
    texts = [each for each in exchange.gather("strategy_text", sent, _START_TIMEOUT_S) if each]
    with making_sense("how the ranks lay out their tensors"):
        specs = (spec for each in texts for spec in Strategy.from_json(json.loads(each)).tensors)
        strategy = Strategy(ranks.world_size, tuple(specs))
    # Nothing is said of others where that is only assumed.
    samples = [known[0] for group in strategy.classes if (known := [s for s in group.tensors if not s.assumed])]
    collector.layouts.set_job_layouts(samples)
    return Target(strategy, collector.layouts.blueprint())


def _own_strategy(collector: Collector, ranks: RankInfo) -> Strategy:
    shapes = {place: ("", shape) for place, shape in collector.layouts.shapes().items()}
    own = collector.layouts.record().strategy(shapes)
    return Strategy(ranks.world_size, (*own.tensors, *collector.layouts.markers()))
