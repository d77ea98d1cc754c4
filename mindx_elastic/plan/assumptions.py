"""What files only assume of each other, put to the test: replicas have equal digests.

A file has an *echo* for each kind of tensor that it assumes other ranks to hold, too: a digest over the names and
digests of these tensors. Files of one step that hold the same shard must have the same echo; where they do not, these
tensors are each rank's own. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import xxhash

from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.plan.facts import FileFact, Moment
from mindx_elastic.plan.targets import MARKER

__all__ = ["OWN", "differing_components", "echoes_of", "settle_assumptions"]

OWN = "="
"""Begins the key of an echo of a component that no layout describes: it may be the rank's own, and nothing follows from
equality."""


def echoes_of(strategy: Strategy, rank: int, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, str]:
    """Echoes of the file of `rank`. `tensors`: name -> (shape of the rank's part, digest)."""
    found: dict[str, Any] = {}
    for spec in strategy.tensors:
        if spec.assumed and rank in spec.layout and spec.name in tensors:
            shape, digest = tensors[spec.name]
            key = f"{_kind(spec)}|{spec.layout.shard_of(rank)}"
            found.setdefault(key, xxhash.xxh3_128()).update(f"{spec.name} {shape} {digest}\n".encode())
    return {key: digest.hexdigest() for key, digest in found.items()}


def settle_assumptions(facts: Sequence[FileFact]) -> list[FileFact]:
    """Where files of one step disagree on what they assumed to be replicas, each file of the run keeps that for itself:
    its strategy then says that these tensors lie on its own rank alone, so that nobody stands in for it.

    facts: all that are known. One step of a run at which two ranks differ is enough. Where no two ranks of a run have
    ever been seen to agree (one voice is none), nothing is believed either.
    """
    voices: dict[tuple[Moment, str], dict[str, set[int]]] = {}
    for fact in facts:
        for key, echo in fact.echoes.items():
            if not key.startswith(OWN):
                voices.setdefault((fact.moment, key), {}).setdefault(echo, set()).add(fact.rank)
    split: set[tuple[str, str]] = set()
    confirmed: set[tuple[str, str]] = set()
    for (moment, key), echoes in voices.items():
        kind = (moment[0], key.rpartition("|")[0])
        if len(echoes) > 1:
            split.add(kind)
        elif any(len(ranks) > 1 for ranks in echoes.values()):
            confirmed.add(kind)
    return [_settled(fact, split, confirmed) for fact in facts]


def _settled(fact: FileFact, split: set[tuple[str, str]], confirmed: set[tuple[str, str]]) -> FileFact:
    run = fact.moment[0]
    kinds = {key.rpartition("|")[0] for key in fact.echoes if not key.startswith(OWN)}
    lone = {kind for kind in kinds if (run, kind) in split or (run, kind) not in confirmed}
    return replace(fact, strategy=_lone(fact.strategy, fact.rank, lone)) if lone else fact


def differing_components(facts: Iterable[FileFact]) -> list[str]:
    """Components without a layout whose tensors differ from file to file of one step."""
    voices: dict[str, set[str]] = {}
    for fact in facts:
        for key, echo in fact.echoes.items():
            if key.startswith(OWN):
                voices.setdefault(key[len(OWN) :], set()).add(echo)
    return sorted(name for name, echoes in voices.items() if len(echoes) > 1)


def _lone(strategy: Strategy, rank: int, kinds: set[str]) -> Strategy:
    """`strategy` with what belongs to `kinds` on `rank` alone; and a marker for every other rank that has its own."""
    layout = Layout((1,), (REPLICATE,), (rank,))
    specs: list[TensorSpec] = []
    told: set[str] = set()
    for spec in strategy.tensors:
        kind = _kind(spec)
        if not spec.assumed or kind not in kinds or spec.layout.num_shards == spec.layout.size:
            specs.append(spec)  # the last: no rank stands in for another anyway
            continue
        if kind not in told:
            told.add(kind)
            specs += [
                TensorSpec(f"{MARKER}{spec.name}", (), Layout((1,), (REPLICATE,), (each,)))
                for each in spec.layout.ranks
            ]
        if rank in spec.layout:
            part = spec.layout.local_shape(spec.shape, spec.layout.shard_of(rank))
            specs.append(replace(spec, shape=part, layout=layout))
    return Strategy(strategy.world_size, tuple(specs))


def _kind(spec: TensorSpec) -> str:
    return f"{spec.name.partition('.')[0]}|{_layout_key(spec.layout)}"


@lru_cache(maxsize=1024)
def _layout_key(layout: Layout) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(layout.to_json()).encode())
