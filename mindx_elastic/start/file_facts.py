"""Turns catalog entries into the facts that the planner needs of each file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import xxhash

from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.core.strategy import RECORD_VERSION, LayoutRecord, Strategy, TensorSpec, global_name
from mindx_elastic.errors import UsageError
from mindx_elastic.persist.catalog import CatalogEntry, preference
from mindx_elastic.persist.format import CheckpointInfo, Header
from mindx_elastic.persist.places import Places, SharedPlaces, places_in, shape_of_node
from mindx_elastic.persist.shared_json import SharedJson
from mindx_elastic.start.assumptions import UNDESCRIBED, replica_digests_of
from mindx_elastic.start.facts import FileFact, PartsHeld, Rejected, single_rank_strategy

__all__ = [
    "Strategies",
    "facts_of",
    "strategy_of",
]


class Strategies:
    """Keeps one object for all equal strategies, so that those of thousands of files are compared by identity."""

    def __init__(self, shared: SharedJson | None = None) -> None:
        """`shared`: has read the headers."""
        self._shared = shared or SharedJson()
        self._places = SharedPlaces(self._shared, without=RESERVED_NAMES)
        self._known: dict[Strategy, Strategy] = {}
        self._same: dict[int, Strategy] = {}
        self._described: dict[tuple[object, ...], tuple[_Described, Header]] = {}

    def described(self, header: Header) -> _Described:
        """Worked out once for files that say the same, but for the rank. Raises UsageError for a record that
        contradicts itself or the file."""
        parts = self._places.parts_of(header.tree)
        key = (
            header.info.world_size,
            id(header.entries),
            None if header.held is None else header.held.division.digest,
            *(id(part) if is_shared else _said_of(part) for part, is_shared in parts),
            *((name, id(value)) for name, value in header.layout.items() if value in self._shared),
            json.dumps({k: v for k, v in header.layout.items() if k != "rank" and v not in self._shared}),
        )
        found = self._described.get(key)
        if found is None:
            places = {place: node for part, _ in parts for place, node in part.items()}
            # The header is kept, so that no other object gets an id in the key.
            found = self._described[key] = _Described(header, places, self), header
        return found[0]

    def one(self, strategy: Strategy) -> Strategy:
        """Raises UsageError if the other ranks could not decode it."""
        if self._same.get(id(strategy)) is strategy:  # the hash of a strategy goes through all its tensors
            return strategy
        found = self._known.get(strategy)
        if found is None:
            Strategy.from_json(strategy.to_json())
            found = self._known[strategy] = strategy
        self._same[id(found)] = found
        return found


def _said_of(places: Places) -> tuple[tuple[str, str, str], ...]:
    """What the shape of a tensor follows from, besides its entry."""
    return tuple((place, node["$tensor"], str(node.get("dtype", ""))) for place, node in places.items())


def facts_of(
    entries: Iterable[CatalogEntry], strategies: Strategies | None = None
) -> tuple[list[FileFact], list[Rejected]]:
    """The files that can be resumed from, in the order in which a rank's are tried; and those that cannot be used.

    Foreign files and files that are not for resuming are in neither list. Uses the given headers and reads no file.
    """
    strategies = strategies or Strategies()
    facts: list[FileFact] = []
    rejected: list[Rejected] = []
    good = sorted((entry for entry in entries if entry.info is not None), key=preference)
    for entry in entries:
        if entry.problem and (entry.looks_ours or not entry.foreign):
            rejected.append(Rejected(str(entry.path), entry.problem))
    for entry in good:
        info, header = entry.info, entry.header
        assert info is not None and header is not None
        if not info.resumable:
            continue
        try:
            strategy, replica_digests = strategy_of(header, strategies)
            strategy = strategies.one(strategy)
        except MemoryError:
            raise  # ours, not the file's
        except Exception as error:
            # Any error that a record causes is damage of the file. Its tensors are sound all the same: it serves its
            # own rank, at the same world size.
            reason = f"it serves rank {info.rank} only, since its layout record is malformed: {error!s:.300}"
            rejected.append(Rejected(str(entry.path), reason))
            strategy, replica_digests = strategies.one(single_rank_strategy(info.rank, info.world_size)), {}
        facts.append(_fact(entry, info, strategy, replica_digests))
    return facts, rejected


def _fact(entry: CatalogEntry, info: CheckpointInfo, strategy: Strategy, replica_digests: dict[str, str]) -> FileFact:
    held = None if entry.header is None else entry.header.held
    return FileFact(
        path=str(entry.path),
        rank=info.rank,
        moment=info.moment,
        world_size=info.world_size,
        strategy=strategy,
        kind=info.kind,
        created=info.created,
        nbytes=entry.size,
        epoch=info.epoch,
        step_in_epoch=info.step_in_epoch,
        base=_base_of(info),
        generation=info.generation,
        fault_report=info.coordinates.get("fault_report", 0),
        replica_digests=replica_digests,
        unmanaged=tuple(info.unmanaged),
        held=None if held is None else PartsHeld(held.key, held.division.count, held.parts),
        writers=max(0, info.coordinates.get("writers", 0)),
    )


def _base_of(info: CheckpointInfo) -> tuple[int, int] | None:
    """Attempt and step that the file's attempt resumed from, as its header says."""
    attempt, step = info.coordinates.get("base_attempt"), info.coordinates.get("base_step")
    return None if attempt is None or step is None else (attempt, step)


def strategy_of(header: Header, strategies: Strategies | None = None) -> tuple[Strategy, dict[str, str]]:
    """The layouts of a file's tensors, from its header, and its replica_digests (see `start.assumptions`).

    Raises UsageError for a record that contradicts itself or the file.
    """
    strategies = strategies or Strategies()
    info, record = header.info, header.layout
    if record.get("version") != RECORD_VERSION:
        return _without_record(header), {}
    if (record.get("rank"), record.get("world_size")) != (info.rank, info.world_size):
        raise UsageError(f"its layout record is of rank {record.get('rank')!r} of {record.get('world_size')!r}")
    described = strategies.described(header)
    return described.strategy, described.replica_digests(info.rank, header.digests)


def _without_record(header: Header) -> Strategy:
    """The strategy of a file that another program has made with our writer."""
    info = header.info
    if info.world_size > 1 and info.coordinates.get("replicas") != info.world_size:
        return single_rank_strategy(info.rank, info.world_size)
    layout = Layout((info.world_size,), (REPLICATE,))
    places = {p: node for p, node in places_in(header.tree).items() if p.partition(".")[0] not in RESERVED_NAMES}
    shapes = _shapes(places, header)
    specs = (TensorSpec(place, shape, layout, dtype) for place, (dtype, shape) in shapes.items())
    return Strategy(info.world_size, tuple(specs))


def _shapes(places: Places, header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {place: (header.type_of(node["$tensor"])[0], shape_of_node(node, header)) for place, node in places.items()}


class _Described:
    """What files whose records differ only in the rank say of their tensors, and where the digests of them are."""

    def __init__(self, header: Header, places: Places, strategies: Strategies) -> None:
        record, shapes = header.layout, _shapes(places, header)
        volatile = {f"{component}.{name}" for component, names in record.get("volatile", {}).items() for name in names}
        parameters = record.get("parameters", {})
        described = {*record.get("modules", {p.partition(".")[0] for p in places}), *parameters}
        kept = {p: shape for p, shape in shapes.items() if p not in volatile and p.partition(".")[0] in described}
        self.strategy = strategies.one(LayoutRecord.from_json(record).strategy(kept))
        names = {global_name(place, parameters)[0]: place for place in kept}
        self._assumed = [
            (spec.name, shapes[place][1], places[place]["$tensor"])
            for spec in self.strategy.tensors
            if spec.assumed and (place := names.get(spec.name)) is not None
        ]
        free = {place: shape for place, shape in shapes.items() if place.partition(".")[0] not in described}
        self._undescribed = _undescribed(free, places)

    def replica_digests(self, rank: int, digests: Mapping[str, str]) -> dict[str, str]:
        """The digests of the file of `rank` in which the tensors have these digests."""
        # A tensor that is in parts has none: its replicas are known to be equal, and nothing is assumed of it.
        assumed = {name: (shape, digests.get(tensor, "")) for name, shape, tensor in self._assumed}
        found = replica_digests_of(self.strategy, rank, assumed) if assumed else {}
        for key, lines in self._undescribed.items():
            text = "".join([f"{line}{digests.get(tensor, '')}\n" for line, tensor in lines])
            found[key] = xxhash.xxh3_128_hexdigest(text.encode())
        return found


def _undescribed(shapes: Mapping[str, tuple[str, tuple[int, ...]]], places: Places) -> dict[str, list[tuple[str, str]]]:
    """What the digests of components say that are neither module nor optimizer: an average of weights (EMA) is sharded
    as they are. Component -> beginnings of its lines, and the tensors whose digests end them.

    Floating-point tensors only: generators and counters differ between ranks, and can start again.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for place, (dtype, shape) in sorted(shapes.items()):
        if dtype.startswith(("F", "BF")) and shape:
            line = f"{place} {shape} ", places[place]["$tensor"]
            found.setdefault(f"{UNDESCRIBED}{place.partition('.')[0]}", []).append(line)
    return found
