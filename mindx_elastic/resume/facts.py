"""Catalog entries -> what the planner wants to know of each file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import xxhash

from mindx_elastic.errors import UsageError
from mindx_elastic.persist.catalog import CatalogEntry, preference
from mindx_elastic.persist.format import CheckpointInfo, Header
from mindx_elastic.persist.places import shape_of_node, tensor_places
from mindx_elastic.plan.facts import FileFact, Moment, Rejected, alone
from mindx_elastic.plan.layout import REPLICATE, Layout
from mindx_elastic.plan.strategy import Strategy, TensorSpec, strategy_from_record

__all__ = [
    "Strategies",
    "facts_of",
    "pack_facts",
    "settle_assumptions",
    "strategy_digest",
    "strategy_of",
    "unpack_facts",
]

_NO_PART_OF_IT = ("rng", "progress", "gradient_order")


class Strategies:
    """Keeps one object for all files that say the same, so that thousands of files are compared by identity."""

    def __init__(self) -> None:
        self._known: dict[Strategy, Strategy] = {}
        self._read: dict[tuple[Any, ...], Strategy] = {}

    def of_record(self, record: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Strategy:
        """`strategy_from_record`, worked out once for files whose records differ in nothing but the rank."""
        key = (json.dumps({**record, "rank": 0}), frozenset(tensors.items()))
        if key not in self._read:
            self._read[key] = self.one(strategy_from_record(record, tensors))
        return self._read[key]

    def one(self, strategy: Strategy) -> Strategy:
        return self._known.setdefault(strategy, strategy)


def facts_of(
    entries: Iterable[CatalogEntry], strategies: Strategies | None = None
) -> tuple[list[FileFact], list[Rejected]]:
    """The files that can be resumed from, in the order in which a rank's are tried; and those that cannot be used.

    Foreign files and those that are not meant for resuming are in neither. Reads no file: the headers are there.
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
            strategy, echo = strategy_of(header, strategies)
        except UsageError as error:
            rejected.append(Rejected(str(entry.path), str(error)))
            continue
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            rejected.append(Rejected(str(entry.path), f"malformed layout record: {error!r:.200}"))
            continue
        facts.append(_fact(entry, info, strategies.one(strategy), echo))
    return facts, rejected


def _fact(entry: CatalogEntry, info: CheckpointInfo, strategy: Strategy, echo: str) -> FileFact:
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
        fault_report=info.coordinates.get("fault_report", 0),
        echo=echo,
    )


def strategy_of(header: Header, strategies: Strategies | None = None) -> tuple[Strategy, str]:
    """What a file says of the layout of its tensors, and the digest of what it only assumes others to hold, too.

    Raises UsageError for a record that contradicts itself or the file.
    """
    info, record = header.info, header.layout
    places = {
        place: node for place, node in tensor_places(header).items() if place.partition(".")[0] not in _NO_PART_OF_IT
    }
    shapes = {place: (header.entries[n["$tensor"]].dtype, shape_of_node(n, header)) for place, n in places.items()}
    if record.get("version") == 2:
        if (record.get("rank"), record.get("world_size")) != (info.rank, info.world_size):
            raise UsageError(f"its layout record is of rank {record.get('rank')!r} of {record.get('world_size')!r}")
        volatile = {f"{c}.{name}" for c, names in record.get("volatile", {}).items() for name in names}
        kept = {place: shape for place, shape in shapes.items() if place not in volatile}
        strategy = (strategies or Strategies()).of_record(record, kept)
        return strategy, _echo(record, kept, places, header)
    # Older files, and those that other programs made with our writer.
    if info.world_size == 1 or info.coordinates.get("replicas") == info.world_size:
        layout = Layout((info.world_size,), (REPLICATE,))
        specs = (TensorSpec(place, shape, layout, dtype) for place, (dtype, shape) in shapes.items())
        return Strategy(info.world_size, tuple(specs)), ""
    return alone(info.rank, info.world_size), ""


def _echo(record: Mapping[str, Any], kept: Iterable[str], places: Mapping[str, Any], header: Header) -> str:
    """Over the digests of tensors that are *assumed* to be replicas: equal in two files, the assumption holds there.

    Only of those that are whole in each file; parts are not compared.
    """
    assumed = {n for n in record.get("assumed", ()) if set(record["layouts"][n]["placements"]) == {"R"}}
    if not assumed:
        return ""
    named, default = record.get("tensors", {}), record.get("default")
    digest = xxhash.xxh3_128()
    for place in sorted(kept):
        if (named[place][0] if place in named else default) in assumed:
            digest.update(f"{place} {header.digests[places[place]['$tensor']]}\n".encode())
    return digest.hexdigest()


def settle_assumptions(facts: list[FileFact]) -> list[FileFact]:
    """Where files of one step disagree on what they assumed to be replicas, each keeps that for itself.

    Whole-tensor replicas only (`FileFact.echo`). The files' strategies are replaced by ones in which those tensors lie
    on the file's own rank alone, so that nobody stands in for it.
    """
    voices: dict[tuple[Moment, int], set[str]] = {}
    for fact in facts:
        if fact.echo:
            voices.setdefault((fact.moment, id(fact.strategy)), set()).add(fact.echo)
    split = {key for key, echoes in voices.items() if len(echoes) > 1}
    if not split:
        return facts
    return [replace(f, strategy=_own(f.strategy, f.rank)) if (f.moment, id(f.strategy)) in split else f for f in facts]


def _own(strategy: Strategy, rank: int) -> Strategy:
    lone = Layout((1,), (REPLICATE,), (rank,))
    specs = (spec if spec.layout.splitting else replace(spec, layout=lone) for spec in strategy.tensors)
    return Strategy(strategy.world_size, tuple(specs))


_ROW = ("path", "rank", "world_size", "kind", "created", "nbytes", "epoch", "step_in_epoch", "fault_report", "echo")


def pack_facts(facts: Sequence[FileFact]) -> list[list[Any]]:
    """JSON-able rows; `unpack_facts` is the way back. Strategies are sent apart, here stands the digest of each.

    `visible_to` is not sent: it is what the receivers find out.
    """
    digests: dict[int, str] = {}
    for fact in facts:
        if id(fact.strategy) not in digests:
            digests[id(fact.strategy)] = strategy_digest(fact.strategy)
    return [[list(f.moment), digests[id(f.strategy)], *(getattr(f, name) for name in _ROW)] for f in facts]


def strategy_digest(strategy: Strategy) -> str:
    """The same on every rank for equal strategies."""
    return xxhash.xxh3_128_hexdigest(json.dumps(strategy.to_json(), sort_keys=True).encode())


def unpack_facts(rows: Iterable[list[Any]], strategies: Mapping[str, Strategy]) -> list[FileFact]:
    """`strategies`: by digest."""
    found = []
    for (run, attempt, step), digest, *values in rows:
        named = dict(zip(_ROW, values, strict=True))
        found.append(FileFact(moment=(str(run), int(attempt), int(step)), strategy=strategies[digest], **named))
    return found
