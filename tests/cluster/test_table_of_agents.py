"""The table of a job whose members are agents, without a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindx_elastic.cluster import messages
from mindx_elastic.cluster.messages import Dead, Farewell, Group, Identity, News, Over, Refused, Register, Welcome
from mindx_elastic.cluster.table import Limits, Table

LIMITS = Limits(heartbeat_s=15.0, reconnect_s=3.0, formation_s=float("inf"), last_call_s=30.0)


class Job:
    """Agents by letters, and what each has been told."""

    def __init__(self, least: int, most: int) -> None:
        self.table = Table(most, least=least, run_id="7", job="job", recovery=True, limits=LIMITS, now=0.0)
        self.now = 0.0
        self.said: dict[str, Register] = {}
        self._number = 0

    def meet(self, *names: str, **more: Any) -> None:
        """They want to be in the next group."""
        for name in names:
            self._number += 1
            known = self.said.get(name)
            first = Register(
                process=Identity(host=name, pid=1, space=""),
                incarnation="",
                node_id="" if known is None else known.node_id,
                run_id="7",
                ranks=2,
                role="default",
                store=(name, 1),
            )
            self.said[name] = replace(first, **{"incarnation": f"{self._number:032d}", **more})
            self.say(name)

    def say(self, name: str, **more: Any) -> None:
        self.said[name] = replace(self.said[name], **more)
        self.table.register(self.said[name], self.now)
        self.hear()

    def hear(self) -> None:
        names = {said.incarnation: name for name, said in self.said.items()}
        self.told: dict[str, list[messages.Message]] = {}
        for incarnation, message in self.table.outbox:
            name = names[incarnation]
            self.told.setdefault(name, []).append(message)
            if isinstance(message, Welcome):
                self.said[name] = replace(self.said[name], node_id=message.node_id, job=message.job)
        self.table.outbox.clear()

    def leave(self, name: str, how: messages.How, why: str = "") -> None:
        self.table.leave(self.said[name].incarnation, Farewell(how, 143 if how == "left" else 0, why), self.now)
        self.hear()

    def wait(self, seconds: float, *heard: str) -> None:
        self.now += seconds
        for name in heard:
            self.table.hear(self.said[name].incarnation, self.now)
        self.table.tick(self.now)
        self.hear()

    def news(self, name: str) -> News:
        (found,) = (each for each in self.told[name] if isinstance(each, News))
        return found

    @property
    def group(self) -> str:
        return "".join(place.said.process.host for place in self.table._members())


def test_nodes_meet_when_all_are_there_or_enough_have_waited() -> None:
    job = Job(2, 3)
    job.meet("a", "b")
    job.wait(14, "a", "b")
    job.wait(15, "a", "b")
    assert job.table.generation == -1
    job.wait(1, "a", "b")
    assert job.group == "ab"
    whole = Job(2, 3)
    whole.meet("a", "b", "c")
    assert whole.group == "abc"
    (told,) = whole.told["b"]
    assert isinstance(told, Group) and (told.node, told.rank, told.size, told.nodes) == (1, 2, 6, 3)
    assert (told.host, told.port) == ("a", 1), "the first node's worker hosts the store"


def test_roles_have_ranks_of_their_own() -> None:
    job = Job(2, 2)
    job.meet("a", role="reader", ranks=3)
    job.meet("b", role="trainer")
    (told,) = (each for each in job.told["b"] if isinstance(each, Group))
    assert (told.rank, told.size, told.role_rank, told.role_size) == (3, 5, 0, 2)


def test_a_newcomer_is_told_to_the_group_which_meets_again() -> None:
    job = Job(1, 3)
    job.meet("a", "b")
    job.wait(5, "a", "b")
    job.wait(30, "a", "b")
    job.meet("c")
    assert job.news("a") == News(1, (), "")
    job.meet("a")
    assert job.news("b").missing == (0,)
    job.meet("b")
    assert job.group == "abc" and job.table.generation == 1


def test_a_standby_node_is_no_news_until_one_is_lost_and_takes_its_place() -> None:
    job = Job(2, 2)
    job.meet("a", "b", "s")
    assert job.group == "ab" and "a" not in job.told
    job.wait(20, "b", "s")
    assert (job.news("b").waiting, job.news("b").missing, job.news("b").failed) == (1, (0,), True)
    job.meet("b", why="killed", restarts=1)
    assert job.group == "sb", "who was there keeps its number"
    assert all(isinstance(each[-1], Group) and each[-1].restarts == 1 for each in job.told.values())


def test_a_node_that_is_heard_before_the_others_have_met_is_in_its_group_again() -> None:
    job = Job(2, 2)
    job.meet("a", "b")
    job.wait(20, "b")
    assert job.news("b").missing == (0,)
    job.say("a")
    assert job.news("b") == News(0, (), "")
    job.wait(20, "b")
    job.meet("b", why="killed")
    job.meet("s")
    assert job.group == "sb"
    job.say("a")
    assert [type(each) for each in job.told["a"]] == [Dead]


@pytest.mark.parametrize(
    ("how", "wanted"), [("finished", Over(0, "")), ("left", Over(143, "")), ("failed", Over(1, "", 1))]
)
def test_all_nodes_of_a_group_hear_the_same_end(how: Any, wanted: Over) -> None:
    job = Job(3, 3)
    job.meet("a", "b", "c")
    for name in ("a", "c"):
        job.say(name, has_finished=True)
    assert not any(isinstance(each, Over) for told in job.told.values() for each in told)
    if how == "finished":
        job.say("b", has_finished=True)
    else:
        job.leave("b", how, "why")
    for name in ("a", "c"):
        (end,) = (each for each in job.told[name] if isinstance(each, Over))
        assert replace(end, why="") == wanted
        assert end.why.endswith("why") or how == "finished"


def test_a_node_lost_at_its_end_lets_the_others_meet_again() -> None:
    job = Job(2, 2)
    job.meet("a", "b")
    job.say("a", has_finished=True)
    job.wait(20, "a")
    assert job.news("a").missing == (1,) and job.table.outcome is None
    job.meet("a", "c")
    assert job.group == "ac"


def test_an_agent_that_gives_up_ends_the_job_and_one_that_is_stopped_does_not() -> None:
    for how, is_over in (("failed", True), ("left", False)):
        job = Job(2, 2)
        job.meet("a", "b")
        job.meet("a", why="killed")
        job.leave("b", how, "too often")  # type: ignore[arg-type]
        assert any(isinstance(each, Over) for each in job.told.get("a", [])) == is_over
        job.meet("c")
        assert isinstance(job.told["c"][0], Refused) == is_over
        assert (job.group == "ac") == (not is_over)


def test_static_ranks_are_kept_and_another_job_is_refused() -> None:
    job = Job(2, 2)
    job.meet("a", node_id="1")
    job.meet("b", node_id="0")
    assert job.group == "ba"
    for more, why in (({"run_id": "8"}, "--rdzv-id 8"), ({"node_id": "2"}, "--node-rank 2"), ({"job": "x"}, "")):
        job.meet("x", **more)
        (refused,) = job.told["x"]
        assert isinstance(refused, Refused) and why in refused.why
