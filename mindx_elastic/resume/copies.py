"""A rank's files that only other ranks hold: copies on other nodes, after this rank's node has lost its disk.

All ranks say together what they hold for ranks that lack it; a step then counts as held by its rank. The file is
fetched only when that step is about to be read, so that no more is moved than is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Protocol

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.errors import CheckpointError
from mindx_elastic.events import logger
from mindx_elastic.persist.catalog import CatalogEntry
from mindx_elastic.persist.format import Moment

__all__ = ["Copies", "Transport"]

_START_TIMEOUT_S = 1800.0
_MAX_MOMENTS = 4  # of each rank: the newest, and some to fall back on


class Transport(Protocol):
    """What carries files between ranks; the package's own is `mirror.mirror.Mirror`."""

    @property
    def partners(self) -> Sequence[int]:
        """The ranks that keep copies of this rank's files."""

    def locate(self, path: Path, rank: int) -> tuple[int, str] | None:
        """The place of a file of `rank`, the same on every rank: number of the directory and path in it."""

    def fetch(self, holder: int, root: int, name: str) -> Path:
        """Get a file of this rank from another rank; returns where it is. Raises OSError or CheckpointError."""


class Copies:
    """What other ranks hold of this rank's files. Main thread. Without a transport there is nothing."""

    def __init__(self, transport: Transport | None, rank: int) -> None:
        self._transport, self._rank = transport, rank
        self._places: dict[Moment, list[tuple[int, int, str]]] = {}
        self._own: dict[Moment, tuple[int, str]] = {}

    def share(
        self,
        entries: Sequence[CatalogEntry],
        held: Sequence[AbstractSet[Moment]],
        order: Callable[[Moment], Any],
        exchange: Exchange,
    ) -> list[set[Moment]]:
        """Tell the other ranks which of `entries` they lack, by `held`; returns what each of them has or can have so.

        All ranks together. `order`: sort key of moments, the newest first.
        """
        found = [set(moments) for moments in held]
        if self._transport is None:
            return found
        exchange.publish("copies", json.dumps(self._offers(entries, held, order)))
        for holder, text in enumerate(exchange.collect("copies", _START_TIMEOUT_S)):
            for run, attempt, step, owner, root, name in json.loads(text):
                moment = (str(run), int(attempt), int(step))
                found[owner].add(moment)
                if owner == self._rank:
                    self._places.setdefault(moment, []).append((holder, int(root), str(name)))
        return found

    def _offers(
        self, entries: Sequence[CatalogEntry], held: Sequence[AbstractSet[Moment]], order: Callable[[Moment], Any]
    ) -> list[tuple[Any, ...]]:
        assert self._transport is not None
        lacking: dict[int, dict[Moment, tuple[int, str]]] = {}
        for entry in entries:
            info = entry.info
            if info is None:
                continue
            place = self._transport.locate(entry.path, info.rank)
            if info.rank == self._rank and place is not None:
                self._own.setdefault(info.moment, place)
            elif place is not None and info.moment not in held[info.rank]:
                lacking.setdefault(info.rank, {}).setdefault(info.moment, place)
        return [
            (*moment, owner, *places[moment])
            for owner, places in lacking.items()
            for moment in sorted(places, key=order)[:_MAX_MOMENTS]
        ]

    def fetch(self, moment: Moment) -> Iterator[Path | str]:
        """This rank's file of `moment`, from each holder in turn, or why it could not be had there.

        Also for a file that this rank had, and that has turned out to be damaged: its partners are asked then.
        """
        if self._transport is None:
            return
        places = self._places.get(moment, [])
        if not places and moment in self._own:
            places = [(partner, *self._own[moment]) for partner in self._transport.partners]
        for holder, root, name in places:
            try:
                path = self._transport.fetch(holder, root, name)
            except (OSError, CheckpointError) as error:
                yield f"{name} cannot be had from rank {holder}: {error}"
                continue
            logger.warning("rank %d takes its file of step %d from rank %d: %s", self._rank, moment[2], holder, path)
            yield path
