"""What several ranks find, and what they make of it together, without an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.core.owners import Trust
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.start.findings import Findings, Place, list_files, scan
from mindx_elastic.start.inventory import Inventory

__all__ = ["Carrier", "look", "look_alone", "sent"]


class Carrier:
    """A transport that finds every file in the first directory, under its own name."""

    def locate(self, path: Path, rank: int) -> Place | None:
        return 0, f"rank_{rank}/{path.name}"

    def fetch(self, holder: int, root: int, name: str) -> Path:
        raise OSError("nothing is fetched here")


def look(places: Sequence[Path], arenas: Sequence[Path] | None = None, **options: Any) -> list[Findings]:
    """Rank r looks at ``places[r]``; ranks that see the same share the reading."""
    memory: Sequence[Path | None] = [None] * len(places) if arenas is None else arenas
    listings = [list_files([place], arena) for place, arena in zip(places, memory, strict=True)]
    disks, machines = [one.disk for one in listings], [one.machine for one in listings]
    return [
        scan(
            listing,
            trust=Trust(),
            rank=rank,
            share=(disks[:rank].count(listing.disk), disks.count(listing.disk)),
            memory_share=(machines[:rank].count(listing.machine), machines.count(listing.machine)),
            **options,
        )
        for rank, listing in enumerate(listings)
    ]


def sent(findings: Sequence[Findings]) -> list[Findings]:
    """As they arrive: every strategy once, and only what goes over the wire."""
    strategies: dict[str, Strategy] = {}
    for found in findings:
        strategies |= {digest: Strategy.from_json(each.to_json()) for digest, each in found.strategies.items()}
    return [Findings.decode(found.encode(), strategies) for found in findings]


def look_alone(directory: Path, arenas: Path | None = None) -> Inventory:
    """One process that wants to know about all ranks."""
    return Inventory.merge([scan(list_files([directory], arenas), trust=Trust())])
