"""Turns catalog entries into the facts that the planner needs of each file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.strategy import RECORD_VERSION, Strategy, TensorSpec, global_name, strategy_from_record
from mindx_elastic.errors import UsageError
from mindx_elastic.persist.catalog import CatalogEntry, preference
from mindx_elastic.persist.format import CheckpointInfo, Header, Held
from mindx_elastic.persist.places import NEIGHBOURS, neighbours_in, shape_of_node, tensor_places
from mindx_elastic.plan.assumptions import UNDESCRIBED, replica_digests_of
from mindx_elastic.plan.facts import FileFact, PartsHeld, Rejected, single_rank_strategy

__all__ = [
    "Strategies",
    "facts_of",
    "strategy_of",
]

_NO_PART_OF_IT = ("rng", "progress", "gradient_order", "compiled_calls", "module_extras", NEIGHBOURS)


class Strategies:
    """Keeps one object for all equal strategies, so that those of thousands of files are compared by identity."""

    def __init__(self) -> None:
        self._known: dict[Strategy, Strategy] = {}
        self._same: dict[int, Strategy] = {}
        self._read: dict[tuple[Any, ...], Strategy] = {}
        self._checked: dict[int, Strategy] = {}

    def of_record(self, record: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Strategy:
        """As `strategy_from_record`, computed once for files whose records differ only in the rank."""
        key = (json.dumps({**record, "rank": 0}), frozenset(tensors.items()))
        if key not in self._read:
            self._read[key] = self.one(strategy_from_record(record, tensors))
        return self._read[key]

    def check(self, strategy: Strategy) -> None:
        """Raises UsageError if the other ranks could not decode this strategy."""
        if id(strategy) not in self._checked:
            Strategy.from_json(strategy.to_json())
            self._checked[id(strategy)] = strategy  # keep it, so that no other object gets its id

    def one(self, strategy: Strategy) -> Strategy:
        if self._same.get(id(strategy)) is strategy:  # the hash of a strategy goes through all its tensors
            return strategy
        found = self._known.setdefault(strategy, strategy)
        self._same[id(found)] = found
        return found


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
            strategies.check(strategy)
        except MemoryError:
            raise  # ours, not the file's
        except Exception as error:
            # Any error that a record causes is damage of the file. Its tensors are sound all the same: it serves its
            # own rank, at the same world size.
            reason = f"it serves rank {info.rank} only, since its layout record is malformed: {error!s:.300}"
            rejected.append(Rejected(str(entry.path), reason))
            strategy, replica_digests = single_rank_strategy(info.rank, info.world_size), {}
        facts.append(_fact(entry, info, strategies.one(strategy), replica_digests))
    return facts, rejected


def _fact(entry: CatalogEntry, info: CheckpointInfo, strategy: Strategy, replica_digests: dict[str, str]) -> FileFact:
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
        fault_report=info.coordinates.get("fault_report", 0),
        replica_digests=replica_digests,
        unmanaged=tuple(info.unmanaged),
        held=None if entry.header is None or entry.header.held is None else _parts_of(entry.header.held),
        neighbours=tuple(sorted(neighbours_in(entry.header))) if entry.header is not None else (),
    )


def _parts_of(held: Held) -> PartsHeld:
    return PartsHeld(held.key, held.division.count, held.parts)


def _base_of(info: CheckpointInfo) -> tuple[int, int] | None:
    """Attempt and step that the file's attempt resumed from, as its header says (`Saver.began_from`)."""
    attempt, step = info.coordinates.get("base_attempt"), info.coordinates.get("base_step")
    return None if attempt is None or step is None else (attempt, step)


def strategy_of(header: Header, strategies: Strategies | None = None) -> tuple[Strategy, dict[str, str]]:
    """The layouts of a file's tensors, from its header, and its replica_digests (see `plan.assumptions`).

    Raises UsageError for a record that contradicts itself or the file.
    """
    info, record = header.info, header.layout
    places = {
        place: node for place, node in tensor_places(header).items() if place.partition(".")[0] not in _NO_PART_OF_IT
    }
    shapes = {place: (header.type_of(n["$tensor"])[0], shape_of_node(n, header)) for place, n in places.items()}
    if record.get("version") != RECORD_VERSION:
        # Files that another program made with our writer.
        if info.world_size == 1 or info.coordinates.get("replicas") == info.world_size:
            layout = Layout((info.world_size,), (REPLICATE,))
            specs = (TensorSpec(place, shape, layout, dtype) for place, (dtype, shape) in shapes.items())
            return Strategy(info.world_size, tuple(specs)), {}
        return single_rank_strategy(info.rank, info.world_size), {}
    if (record.get("rank"), record.get("world_size")) != (info.rank, info.world_size):
        raise UsageError(f"its layout record is of rank {record.get('rank')!r} of {record.get('world_size')!r}")
    volatile = {f"{component}.{name}" for component, names in record.get("volatile", {}).items() for name in names}
    parameters = record.get("parameters", {})
    described = {*record.get("modules", {p.partition(".")[0] for p in places}), *parameters}
    kept = {p: shape for p, shape in shapes.items() if p not in volatile and p.partition(".")[0] in described}
    strategy = (strategies or Strategies()).of_record(record, kept)
    # A tensor that is in parts has none: its replicas are known to be equal, and nothing is assumed of it.
    digests = {place: header.digests.get(node["$tensor"], "") for place, node in places.items()}
    assumed = {global_name(p, parameters)[0]: (shapes[p][1], digests[p]) for p in kept}
    free = {p: (shapes[p], digests[p]) for p in places if p.partition(".")[0] not in described}
    return strategy, {**replica_digests_of(strategy, info.rank, assumed), **_undescribed_digests(free)}


def _undescribed_digests(tensors: Mapping[str, tuple[tuple[str, tuple[int, ...]], str]]) -> dict[str, str]:
    """Digests of components that are neither module nor optimizer: an average of weights (EMA) is sharded as they are.

    Floating-point tensors only: generators and counters differ between ranks, and can begin anew.
    """
    found: dict[str, Any] = {}
    for place, ((dtype, shape), digest) in sorted(tensors.items()):
        if dtype.startswith(("F", "BF")) and shape:
            line = f"{place} {shape} {digest}\n"
            found.setdefault(f"{UNDESCRIBED}{place.partition('.')[0]}", xxhash.xxh3_128()).update(line.encode())
    return {key: digest.hexdigest() for key, digest in found.items()}
