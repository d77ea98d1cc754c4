"""Many schedules of a simulation, by their seeds, what goes wrong in one, and its story: what all simulations share."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from tests.simulation.world import World

__all__ = ["Fault", "Faults", "Played", "play_all", "play_part", "quiet", "shrink", "tell"]

PlanT = TypeVar("PlanT", bound=Any)


@dataclass(frozen=True)
class Fault:
    """One thing that happens."""

    kind: str
    """One of the simulation's `KINDS`."""
    place: int = 0
    """A node, a rank, a place."""
    local_rank: int = 0
    """Of a node."""
    at: float = field(default=0.0, kw_only=True)
    """Seconds after the start, or after the event `on`; for files the number of the call."""
    length_s: float = field(default=0.0, kw_only=True)
    on: tuple[str, int] | None = field(default=None, kw_only=True)
    """An event of the job, and which one of its kind."""

    @property
    def name(self) -> str:
        return self.kind if self.on is None else f"{self.kind}@{self.on[0]}"


class Faults:
    """Lets those of a plan happen."""

    def __init__(self, world: World, plan: Any, strike: Callable[..., None]) -> None:
        """`strike`: gets the fault, and who was there at an event that it is bound to."""
        self._world, self._plan, self._strike = world, plan, strike
        self._events: Counter[str] = Counter()

    def begin(self) -> None:
        """From now on count the times of those that are bound to no event."""
        for fault in self._plan.faults:
            if fault.on is None:
                self._world.at(self._world.now + fault.at, partial(self._strike, fault))

    def event(self, name: str, *who: Any) -> None:
        self._events[name] += 1
        for fault in self._plan.faults:
            if fault.on == (name, self._events[name]):
                self._world.at(self._world.now + fault.at, partial(self._strike, fault, *who))


@dataclass
class Played:
    """What a schedule came to."""

    plan: Any
    story: list[tuple[float, str]] = field(default_factory=list)
    """What happened, for people, and when."""
    switches: int = 0
    messages: int = 0
    """To a store, or pieces that were sent over a connection."""
    seconds: float = 0.0
    """Simulated."""
    stuck: str = ""
    wrong: list[str] = field(default_factory=list)
    """Empty: all that must hold does."""

    def take(self, world: World) -> None:
        """What the world tells of itself at its end."""
        self.story, self.switches, self.seconds = world.story, world.switches, world.now - 1000.0

    def count(self) -> Counter[str]:
        """For the sums of many schedules."""
        counts = Counter(
            {"schedules": 1, "switches": self.switches, "messages": self.messages, "seconds": round(self.seconds)}
        )
        counts.update(f"fault: {fault.kind}" for fault in self.plan.faults)
        return counts


def shrink(plan: PlanT, is_wrong: Callable[[PlanT], bool]) -> PlanT:
    """The same failure with the fewest `plan.faults` that still show it."""
    found = True
    while found:
        found = False
        for number in range(len(plan.faults)):
            smaller = replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
            if is_wrong(smaller):
                plan, found = smaller, True
                break
    return plan


@contextmanager
def quiet() -> Iterator[None]:
    """Thousands of schedules would be logged, by the package and by torch."""
    before = logging.root.manager.disable
    if before < logging.CRITICAL:  # to switch it clears the caches of all loggers
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        if before < logging.CRITICAL:
            logging.disable(before)


def tell(plan: PlanT, play: Callable[[PlanT], Played]) -> str:
    """The story of one schedule."""
    outcome = play(plan)
    lines = [f"{when - 1000:9.4f} s  {text}" for when, text in outcome.story]
    return "\n".join([str(plan), *lines, *(f"WRONG: {text}" for text in outcome.wrong)])


def play_all(simulation: str, seeds: range) -> tuple[Counter[str], list[tuple[int, list[str]]]]:
    """Sums, and which seeds were wrong, and how."""
    module = import_module(f"tests.simulation.{simulation}")
    gc.freeze()  # torch's objects need not be looked at each time that those of a world are collected
    counts: Counter[str] = Counter()
    failed = []
    with quiet():
        for seed in seeds:
            outcome: Played = module.play(module.plan_of(seed))
            counts.update(outcome.count())
            if outcome.wrong:
                failed.append((seed, outcome.wrong))
    return counts, failed


def play_part(part: tuple[str, range]) -> tuple[str, Counter[str], list[tuple[int, list[str]]]]:
    """As `play_all`, in a process of a pool: with the name, and the milliseconds that it took."""
    import_module(f"tests.simulation.{part[0]}")
    began = time.process_time()
    counts, wrong = play_all(*part)
    return part[0], counts + Counter(cpu_ms=round(1000 * (time.process_time() - began))), wrong
