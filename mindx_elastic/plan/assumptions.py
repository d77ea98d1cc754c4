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

from mindx_elastic.plan.facts import FileFact, Moment
from mindx_elastic.plan.layout import REPLICATE, Layout
from mindx_elastic.plan.strategy import Strategy, TensorSpec

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
    """Where files of one step disagree on what they assumed to be replicas, each keeps that for itself: its strategy

    then says that these tensors lie on its own rank alone, so that nobody stands in for it.
    """
    voices: dict[tuple[Moment, str], set[str]] = {}
    for fact in facts:
        for key, echo in fact.echoes.items():
            voices.setdefault((fact.moment, key), set()).add(echo)
    split: dict[Moment, set[str]] = {}
    for (moment, key), echoes in voices.items():
        if len(echoes) > 1 and not key.startswith(OWN):
            split.setdefault(moment, set()).add(key.rpartition("|")[0])
    return [replace(f, strategy=_lone(f.strategy, f.rank, split[f.moment])) if f.moment in split else f for f in facts]


def differing_components(facts: Iterable[FileFact]) -> list[str]:
    """Components without a layout whose tensors differ from file to file of one step."""
    voices: dict[str, set[str]] = {}
    for fact in facts:
        for key, echo in fact.echoes.items():
            if key.startswith(OWN):
                voices.setdefault(key[len(OWN) :], set()).add(echo)
    return sorted(name for name, echoes in voices.items() if len(echoes) > 1)


def _lone(strategy: Strategy, rank: int, kinds: set[str]) -> Strategy:
    layout = Layout((1,), (REPLICATE,), (rank,))
    specs = []
    for spec in strategy.tensors:
        if not spec.assumed or _kind(spec) not in kinds:
            specs.append(spec)
        elif rank in spec.layout:
            part = spec.layout.local_shape(spec.shape, spec.layout.shard_of(rank))
            specs.append(replace(spec, shape=part, layout=layout))
    return Strategy(strategy.world_size, tuple(specs))


def _kind(spec: TensorSpec) -> str:
    return f"{spec.name.partition('.')[0]}|{_layout_key(spec.layout)}"


@lru_cache(maxsize=1024)
def _layout_key(layout: Layout) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(layout.to_json()).encode())
