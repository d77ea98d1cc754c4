"""Which places of a node have a worker: all of them, or fewer where some cannot be filled (``--min-nproc``).

A *place* is what a local rank stands for: a device, a share of the machine. A job of N workers has the places 0 to N-1.
A place is *lost* when two processes in a row have failed in it, the second before it passed a boundary: a rank has died
and no node has taken its place. The workers that remain get the local ranks 0 to n-1 in the order of their places: the
most among which the batches of an update of all N can be shared out evenly.

Pure: no clock, no files, no processes. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["NodePlaces", "PlaceEnd", "visible_devices"]


@dataclass(frozen=True)
class PlaceEnd:
    """How a process of a place has ended in an attempt."""

    place: int
    failed: bool
    """It has failed by itself, and not because another one had."""
    passed: bool
    """It has passed a boundary."""
    cause: str = ""


@dataclass
class NodePlaces:
    """The places of one node."""

    count: int
    least: int
    """Fewest workers that the job goes on with (``--min-nproc``)."""
    lost: dict[int, str] = field(default_factory=dict)
    """Places that cannot be filled, and why."""
    active: tuple[int, ...] = ()
    """Those that have a worker, by local rank."""
    suspects: set[int] = field(default_factory=set)
    """Places whose last process has failed, and where none has passed a boundary since."""

    def __post_init__(self) -> None:
        self.active = tuple(range(self.count))

    @property
    def is_shrunk(self) -> bool:
        return len(self.active) < self.count

    def note_ends(self, ends: Sequence[PlaceEnd]) -> list[int]:
        """An attempt has ended. `ends`: of all its processes in their order. Returns the places that are lost since."""
        found: dict[int, str] = {}
        for end in ends:
            if end.passed:
                found.pop(end.place, None)
            elif end.failed and end.place in self.suspects:
                found[end.place] = end.cause
            if end.failed:
                self.suspects.add(end.place)
            elif end.passed:
                self.suspects.discard(end.place)
        self.lost |= found
        return list(found)

    def note_passed(self, place: int) -> None:
        """The process that runs there has passed a boundary."""
        self.suspects.discard(place)

    def choose(self, *, refusal: str = "", window: int = 1) -> tuple[tuple[int, ...], str]:
        """The places that get a worker in the next attempt; none: why the job cannot go on, for a person. `refusal`:
        why the program cannot run with another number of ranks; empty: it can. `window`: over how many batches each of
        all N accumulates; 0: it does not ask over how many more it is to."""
        working = [place for place in range(self.count) if place not in self.lost]
        if len(working) == self.count:
            return tuple(working), ""
        gone = f"{_names(sorted(self.lost))} cannot be filled"
        if len(working) < self.least:
            return (), f"{gone}, {len(working)} are left, and --min-nproc is {self.least}"
        if not window:
            refusal = refusal or "its loop does not ask guard.accumulation(), so that its global batch would shrink"
        if refusal:
            return (), f"{gone}, and the program cannot go on with fewer ranks: {refusal}"
        total = self.count * window
        size = next(size for size in range(len(working), 0, -1) if total % size == 0)
        if size >= self.least:
            return tuple(working[:size]), ""
        sizes = f"{self.least} to {len(working)}" if self.least < len(working) else str(self.least)
        why = f"the {total} batches of an update cannot be shared out evenly among {sizes} ranks"
        return (), f"{gone}, and {why}; --min-nproc {size} would go on with {size}"


def _names(places: Sequence[int]) -> str:
    if len(places) == 1:
        return f"place {places[0]}"
    return f"places {', '.join(map(str, places))}"


def visible_devices(active: Sequence[int], count: int, visible: str | None, num_devices: int) -> str | None:
    """What ``CUDA_VISIBLE_DEVICES`` must be, so that local rank i runs on the device of place ``active[i]``; None: as
    it is. `visible`: what it is. `num_devices`: how many devices the node has where it is not set.

    A node with fewer devices than workers has no device for each place, and is left alone.
    """
    if list(active) == list(range(len(active))):
        return None
    devices = [str(number) for number in range(num_devices)] if visible is None else visible.split(",")
    if len(devices) < count:
        return None
    return ",".join(devices[place].strip() for place in active)
