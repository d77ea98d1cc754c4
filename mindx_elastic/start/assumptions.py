"""Tests what files only assume of each other: replicas must have equal digests. Pure.

A file has a *replica digest* for each kind of tensor that it assumes other ranks to hold, too: a digest over the names
and digests of these tensors. Files of one step that hold the same shard must have the same replica digest. Where they
do not, each rank has its own tensors there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import xxhash

from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.strategy import MARKER, Strategy, TensorSpec
from mindx_elastic.start.facts import FileFact

__all__ = ["UNDESCRIBED", "differing_components", "replica_digests_of", "settle_assumptions"]

UNDESCRIBED = "="
"""Begins the key of the digest of a component that no layout describes. Each rank may have its own; equal digests prove
nothing."""


def replica_digests_of(
    strategy: Strategy, rank: int, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, str]:
    """The replica digests of the file of `rank`. `tensors`: name -> (shape of the rank's part, digest)."""
    found: dict[str, Any] = {}
    for spec in strategy.tensors:
        if spec.assumed and rank in spec.layout and spec.name in tensors:
            shape, digest = tensors[spec.name]
            key = f"{_kind(spec)}|{spec.layout.shard_of(rank)}"
            found.setdefault(key, xxhash.xxh3_128()).update(f"{spec.name} {shape} {digest}\n".encode())
    return {key: digest.hexdigest() for key, digest in found.items()}


def settle_assumptions(facts: Sequence[FileFact]) -> list[FileFact]:
    """Drop assumptions that the digests do not confirm: the strategies of all files of the run then say that each rank
    has these tensors for itself, so that no other rank's file can replace its own.

    facts: all that are known. An assumption falls when two ranks differ at one step of the run, or when no two ranks
    of the run were ever seen to agree (a single rank confirms nothing).
    """
    seen: dict[tuple[Moment, str], dict[str, set[int]]] = {}
    for fact in facts:
        for key, digest in fact.replica_digests.items():
            if not key.startswith(UNDESCRIBED):
                seen.setdefault((fact.moment, key), {}).setdefault(digest, set()).add(fact.rank)
    split: set[tuple[str, str]] = set()
    confirmed: set[tuple[str, str]] = set()
    for (moment, key), digests in seen.items():
        kind = (moment[0], key.rpartition("|")[0])
        if len(digests) > 1:
            split.add(kind)
        elif any(len(ranks) > 1 for ranks in digests.values()):
            confirmed.add(kind)
    return [_settled(fact, split, confirmed) for fact in facts]


def _settled(fact: FileFact, split: set[tuple[str, str]], confirmed: set[tuple[str, str]]) -> FileFact:
    run = fact.moment[0]
    kinds = {key.rpartition("|")[0] for key in fact.replica_digests if not key.startswith(UNDESCRIBED)}
    unshared = {kind for kind in kinds if (run, kind) in split or (run, kind) not in confirmed}
    return replace(fact, strategy=_without_replicas(fact.strategy, fact.rank, unshared)) if unshared else fact


def differing_components(facts: Iterable[FileFact]) -> list[str]:
    """Components without a layout whose tensors differ between the files of one step."""
    seen: dict[str, set[str]] = {}
    for fact in facts:
        for key, digest in fact.replica_digests.items():
            if key.startswith(UNDESCRIBED):
                seen.setdefault(key[len(UNDESCRIBED) :], set()).add(digest)
    return sorted(name for name, digests in seen.items() if len(digests) > 1)


def _without_replicas(strategy: Strategy, rank: int, kinds: set[str]) -> Strategy:
    """`strategy` with the tensors of `kinds` on `rank` only, and a marker for every rank that has its own."""
    layout = Layout((1,), (REPLICATE,), (rank,))
    specs: list[TensorSpec] = []
    marked: set[str] = set()
    for spec in strategy.tensors:
        kind = _kind(spec)
        if not spec.assumed or kind not in kinds or spec.layout.num_shards == spec.layout.size:
            specs.append(spec)  # the last: every rank holds another shard anyway
            continue
        if kind not in marked:
            marked.add(kind)
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
