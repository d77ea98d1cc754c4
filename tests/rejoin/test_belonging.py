"""Who goes on after the store of the rendezvous was lost: agents that die, stand still, wake up and come late, in any
order, over one new store after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.rejoin.belonging import Adoption, Deed, Sight, deed
from mindx_elastic.rejoin.succession import Claim, meaning


@pytest.mark.parametrize("is_sure", [True, False])
def test_the_old_store_counts_as_ever(is_sure: bool) -> None:
    """Whoever was given up finds that in it."""
    sight = Sight(is_same=True, has_begun=True)
    assert deed(sight, scope="s", generation=3, is_sure=is_sure) is Deed.CLAIM


def test_an_empty_store_is_adopted_by_who_is_sure() -> None:
    assert deed(Sight(), scope="s", generation=1, is_sure=True) is Deed.ADOPT
    assert deed(Sight(), scope="s", generation=1, is_sure=False) is Deed.WAIT


@given(st.booleans(), st.integers(1, 3), st.integers(1, 3), st.sampled_from("st"))
def test_an_adopted_store(is_sure: bool, own: int, adopted: int, scope: str) -> None:
    found = deed(Sight(adoption=Adoption(scope, adopted)), scope="s", generation=own, is_sure=is_sure)
    if scope != "s" or adopted < own:
        assert found is Deed.RESTART
    elif adopted > own:
        assert found is Deed.OUT
    else:
        assert found is (Deed.CLAIM if is_sure else Deed.READ)


def test_a_job_that_has_begun_anew_is_not_joined_in_place() -> None:
    assert deed(Sight(has_begun=True), scope="s", generation=1, is_sure=True) is Deed.RESTART


MOST_STORES, MOST_RECOVERIES = 3, 2


@dataclass(frozen=True)
class Agent:
    """Of one node."""

    node: int
    generation: int = 0
    """Recoveries that are over for it."""
    seeks: bool = True
    """It has lost the first node and the store, and looks for another one."""
    store: int = 0
    """The one that it uses."""
    host: int = 0
    """The first node, for it."""
    sleeps: bool = False
    is_sure: bool = True
    outcome: str = ""
    """``hosts`` or ``follows`` in the recovery under way; ``out``, ``restart``, ``dead``."""

    @property
    def is_in(self) -> bool:
        return not self.sleeps and self.outcome not in ("out", "restart", "dead")


@dataclass(frozen=True)
class World:
    """Node 0, which hosted both stores, is lost. Of the stores at the endpoint the last one is there; those before it
    have ended. New nodes come to it, and take the places of lost ones at once."""

    num: int
    agents: tuple[Agent, ...]
    adoptions: tuple[Adoption | None, ...] = (None,)
    """Of each store."""
    begun: tuple[bool, ...] = (False,)
    """New nodes have begun without the survivors."""
    claims: tuple[tuple[int, int, Claim], ...] = ()
    """The store, the recovery, and the note there."""
    trained: tuple[int, ...] = ()
    """The recoveries that have succeeded."""

    def claim(self, generation: int) -> Claim | None:
        now = len(self.adoptions) - 1
        return next((claim for store, number, claim in self.claims if (store, number) == (now, generation)), None)

    def set(self, index: int, **changes: Any) -> World:
        agents = list(self.agents)
        agents[index] = replace(agents[index], **changes)
        return replace(self, agents=tuple(agents))


def successors(world: World) -> Iterator[World]:
    """All that may happen next."""
    if len(world.adoptions) < MOST_STORES:
        yield replace(world, adoptions=(*world.adoptions, None), begun=(*world.begun, False))
    if len(world.adoptions) > 1 and world.adoptions[-1] is None and not world.begun[-1]:
        yield replace(world, begun=(*world.begun[:-1], True))
    for index, agent in enumerate(world.agents):
        if agent.outcome in ("out", "restart", "dead"):
            continue
        if agent.sleeps:
            yield world.set(index, sleeps=False)
            continue
        yield world.set(index, sleeps=True, is_sure=False)
        if agent.seeks and len(world.adoptions) > 1:
            yield from look(world, index)
        elif agent.outcome == "hosts" and agent.store == len(world.adoptions) - 1:
            yield from go_on(world, agent)
        elif not agent.outcome and not agent.seeks:
            yield die(world, index)


def look(world: World, index: int) -> Iterator[World]:
    """At the endpoint. Between the look and the adoption another one may adopt it: then it looks again."""
    agent, now = world.agents[index], len(world.adoptions) - 1
    own = agent.generation + 1
    sight = Sight(is_same=agent.store == now, adoption=world.adoptions[now], has_begun=world.begun[now])
    what = deed(sight, scope="s", generation=own, is_sure=agent.is_sure)
    if what in (Deed.OUT, Deed.RESTART):
        yield world.set(index, outcome=what.value)
    elif what is Deed.ADOPT:
        yield replace(world, adoptions=(*world.adoptions[:-1], Adoption("s", own)))
    elif what in (Deed.CLAIM, Deed.READ):
        claim = world.claim(own)
        if claim is None and what is Deed.CLAIM:
            claim = Claim(node=agent.node, port=5)
            world = replace(world, claims=(*world.claims, (now, own, claim)))
        if claim is not None:
            found = meaning(claim, node=agent.node, first=agent.host)
            yield world.set(index, outcome=found.value, store=now, host=claim.node, seeks=False)


def go_on(world: World, host: Agent) -> Iterator[World]:
    """With those that have come: who has not is lost."""
    number, now = host.generation + 1, len(world.adoptions) - 1
    before = world.claim(number)
    if before is None or before.node != host.node or len(world.trained) == MOST_RECOVERIES:
        return
    if any(agent.is_in and agent.seeks for agent in world.agents):
        return  # it waits 10 s, in which everybody looks who is awake
    come = [
        agent
        for agent in world.agents
        if agent.is_in
        and agent.outcome in ("hosts", "follows")
        and (agent.store, agent.host, agent.generation) == (now, host.node, host.generation)
    ]
    lost = tuple(sorted(set(range(world.num)) - {agent.node for agent in come}))
    claims = [each for each in world.claims if each[:2] != (now, number)]
    claims.append((now, number, replace(before, lost=lost)))
    agents = [replace(agent, generation=number, outcome="") if agent in come else agent for agent in world.agents]
    agents += [Agent(node, number, seeks=False, store=now, host=host.node) for node in lost]
    yield replace(world, claims=tuple(claims), agents=tuple(agents), trained=(*world.trained, number))


def die(world: World, index: int) -> World:
    """One of a group that trains. Where it is the first node, the others lose it."""
    agent = world.agents[index]
    world = world.set(index, outcome="dead")
    for other, each in enumerate(world.agents):
        group = (each.store, each.host, each.generation) == (agent.store, agent.host, agent.generation)
        if agent.node == agent.host and group and not each.outcome:
            world = world.set(other, seeks=True)
    return world


def check(world: World) -> None:
    assert list(world.trained) == sorted(set(world.trained)), "a recovery has succeeded twice, or an older one later"
    hosts = [(each.store, each.generation) for each in world.agents if each.outcome == "hosts"]
    assert len(set(hosts)) == len(hosts), "two hosts of one recovery in one store"
    for agent in world.agents:
        if agent.outcome == "out":
            assert any(number > agent.generation for number in world.trained), "nobody has what it has not saved"


def begin(num: int) -> World:
    return World(num, tuple(Agent(node) for node in range(1, num)))


@pytest.mark.parametrize(("num", "most"), [(2, 100), (3, 11)])
def test_no_split_brain_in_any_order_of_what_may_happen(num: int, most: int) -> None:
    """With two nodes all orders of all of it; with three all orders of so many things."""
    frontier, known = {begin(num)}, {begin(num)}
    for _ in range(most):
        frontier = {after for world in frontier for after in successors(world)} - known
        for world in frontier:
            check(world)
        known |= frontier
    assert num > 2 or not frontier, "all of it"
    assert any(world.trained == (1, 2) for world in known), "both recoveries succeed in some order"


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(0, 1 << 16), max_size=40))
def test_no_split_brain(num: int, choices: list[int]) -> None:
    world = begin(num)
    for choice in choices:
        ways = list(successors(world))
        if not ways:
            break
        world = ways[choice % len(ways)]
        check(world)
