"""How the nodes of an attempt end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from mindx_elastic.agent import exit_barrier as module
from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.exit_barrier import FINISHED, LOST, ExitBarrier, NodeEnd, end_together, wait_for_all


def one(store: Any, node: int = 0, num_nodes: int = 2) -> ExitBarrier:
    return ExitBarrier(store, node=node, num_nodes=num_nodes, world_size=4)


class Gone:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*arguments: object) -> Any:
            raise RuntimeError("connection reset by peer")

        return fail


def wait(
    barrier: ExitBarrier,
    lost: Callable[[], Mapping[int, str]] = dict,
    new_store: Callable[[], Any | None] = lambda: None,
    timeout_s: float = 60.0,
) -> dict[int, NodeEnd]:
    return wait_for_all(barrier, lost, new_store, timeout_s)


def outcomes(ends: Mapping[int, NodeEnd]) -> dict[int, str]:
    return {node: end.outcome for node, end in ends.items()}


def all_wait(store: Any, num_nodes: int, lost: Mapping[int, Callable[[], Mapping[int, str]]]) -> list[dict[int, str]]:
    """The nodes of `lost` wait, each in a thread; what each comes to."""
    found: dict[int, dict[int, str]] = {}

    def run(node: int) -> None:
        found[node] = outcomes(wait(one(store, node, num_nodes), lost[node]))

    threads = [threading.Thread(target=run, args=(node,)) for node in lost]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return list(found.values())


# --- ranks that were ended after the training ---


def test_what_one_tells_all_hear() -> None:
    store = HashStore()
    first, second = one(store), one(store, 1)
    assert first.heard() == second.heard() == []
    first.tell([3, 1])
    assert first.heard() == second.heard() == [3, 1]


@pytest.mark.parametrize("text", ["", "{", "[4]", "[-1]", "[true]", '["1"]', "{}", "7", "[" * 10_000, "\0"])
def test_nonsense_is_nothing(text: str) -> None:
    store = HashStore()
    store.set("mindx/ended_after_training", text)
    assert one(store).heard() == []


def test_a_store_that_fails_or_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.1)
    over = threading.Event()

    class Silent(Gone):
        def set(self, key: str, value: str) -> None:
            over.wait(30)

    for gone in (one(Gone()), one(Silent())):
        gone.tell([1])
        assert gone.heard() == [] and gone.is_lost
    over.set()


# --- how the nodes have ended ---

# --- how the nodes have ended ---


def test_a_broken_connection_is_opened_again() -> None:
    store = HashStore()
    one(store, 1).say(NodeEnd(FINISHED))
    assert outcomes(wait(one(Gone()), new_store=lambda: store)) == {0: FINISHED, 1: FINISHED}
    assert outcomes(one(store).ends()) == {0: FINISHED, 1: FINISHED}, "the others hear of it"


def test_a_way_to_the_store_that_never_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host stands still."""
    monkeypatch.setattr(module, "_ANSWER_S", 0.1)
    monkeypatch.setattr(module, "_LOST_S", 0.3)
    over = threading.Event()
    assert outcomes(wait(one(Gone()), new_store=lambda: over.wait(60))) == {0: FINISHED, 1: LOST}
    over.set()


def test_all_nodes_wait_for_all() -> None:
    nothing: Callable[[], Mapping[int, str]] = dict
    found = all_wait(HashStore(), 3, {0: nothing, 1: nothing, 2: nothing})
    assert found == [dict.fromkeys(range(3), FINISHED)] * 3


def test_what_one_node_sees_of_a_lost_one_holds_for_all() -> None:
    """Only the first node has a connection to the third."""
    found = all_wait(HashStore(), 3, {0: lambda: {2: "its agent is gone"}, 1: dict})
    assert found == [{0: FINISHED, 1: FINISHED, 2: LOST}] * 2


def test_a_node_that_meets_the_others_again_says_so() -> None:
    store = HashStore()
    one(store, 1).say(NodeEnd("failed", "rank 1: killed by SIGKILL"))
    ends = wait(one(store))
    assert ends[1] == NodeEnd("failed", "rank 1: killed by SIGKILL")
    assert ends[0].outcome == FINISHED


def test_what_was_said_first_counts() -> None:
    """A node that stood still for long finds that it was given up."""
    store = HashStore()
    one(store).say(NodeEnd(LOST, "its agent is silent"), 1)
    assert outcomes(wait(one(store, 1), timeout_s=0.0)) == {1: LOST}
    one(store).say(NodeEnd(FINISHED))
    one(store).say(NodeEnd("failed", "late"))
    assert outcomes(wait(one(store))) == {0: FINISHED, 1: LOST}


def test_a_node_that_lives_and_has_not_ended_is_not_among_them() -> None:
    assert outcomes(wait(one(HashStore()), timeout_s=0.3)) == {0: FINISHED}


def test_with_the_store_the_others_words_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is one of the nodes, and its loss is noticed a moment later."""
    monkeypatch.setattr(module, "_LOST_S", 30.0)
    looks = iter([{}, {}, {0: "its agent is gone"}])
    ends = wait(one(Gone(), 1, 3), lambda: next(looks))
    assert (outcomes(ends), ends[0].cause) == ({0: LOST, 1: FINISHED, 2: LOST}, "its agent is gone")


class GoneAtTheLastQuestion:
    """A store that answers until it is asked for what the nodes have said."""

    def __init__(self, inner: HashStore) -> None:
        self._inner = inner

    def multi_get(self, keys: list[str]) -> list[bytes]:
        raise RuntimeError("connection reset by peer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_words_that_cannot_be_read_any_more_are_not_taken_for_a_finished_training() -> None:
    store = HashStore()
    one(store, 1).say(NodeEnd("failed", "rank 1: killed by SIGKILL"))
    assert outcomes(wait(one(GoneAtTheLastQuestion(store)))) == {0: FINISHED, 1: LOST}


def test_a_store_that_is_lost_without_a_node_is_waited_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOST_S", 0.2)
    assert outcomes(wait(one(Gone()))) == {0: FINISHED, 1: LOST}


@pytest.mark.parametrize("text", ["{", "[]", "7", "{}", "[" * 10_000])
def test_an_end_that_makes_no_sense_is_none_of_a_finished_training(text: str) -> None:
    store = HashStore()
    store.set("mindx/end/1", text)
    assert outcomes(wait(one(store))) == {0: FINISHED, 1: "failed"}


def test_the_last_words_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEEN_S", 30.0)
    store, over = HashStore(), threading.Event()

    def leave() -> None:
        one(store).leave([0, 1])
        over.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert not over.wait(0.3)
    one(store, 1).leave([0, 1])
    assert over.wait(20)
    thread.join(20)
    one(Gone()).leave([0, 1])  # the host of the store was faster


# --- what the ends of the others mean for one whose ranks have finished ---


OWN = Ending(outcome=FINISHED, code=0)


def end(theirs: NodeEnd, lost: Callable[[], Mapping[int, str]] = dict, signum: int | None = None) -> Ending:
    """What node 0 makes of it that node 1 has ended so."""
    store = HashStore()
    one(store, 1).say(theirs)
    inbox: Any = SimpleNamespace(first=signum)
    return end_together(OWN, one(store), lost, inbox=inbox, new_store=lambda: None, timeout_s=60.0)


def test_all_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEEN_S", 0.0)
    assert end(NodeEnd(FINISHED)) == OWN


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("failed", "failed"), ("membership", "membership"), ("grown", "membership"), (LOST, "failed")],
)
def test_one_that_has_not_come_to_its_end_takes_all_with_it(theirs: str, ours: str) -> None:
    found = end(NodeEnd(theirs, "rank 1: killed by SIGKILL"))
    assert (found.outcome, found.code, found.elsewhere) == (ours, 75, True)
    assert found.cause == "node 1 has not ended: rank 1: killed by SIGKILL"


def test_one_that_was_stopped_is_not_waited_for_in_another_attempt() -> None:
    found = end(NodeEnd("stopped", "SIGTERM"))
    assert (found.outcome, found.code, found.cause) == ("stopped", 75, "node 1 was stopped: SIGTERM")


def test_an_agent_that_is_told_to_stop_takes_part_in_no_other_attempt() -> None:
    found = end(NodeEnd("failed", "rank 1: killed by SIGKILL"), signum=15)
    assert (found.outcome, found.code, found.cause) == ("stopped", 143, "SIGTERM")


def test_an_agent_that_is_told_to_stop_waits_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HURRY_S", 0.2)
    inbox: Any = SimpleNamespace(first=15)
    found = end_together(OWN, one(HashStore()), dict, inbox=inbox, new_store=lambda: None, timeout_s=1e9)
    assert (found.outcome, found.code) == ("stopped", 143), "what the other node has still to do is not known"


def test_an_agent_that_is_told_to_stop_at_its_end_waits_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node has finished and does not say that it has seen that: its agent was killed."""
    monkeypatch.setattr(module, "_SEEN_S", 1e9)
    monkeypatch.setattr(module, "_HURRY_S", 0.2)
    signals = iter([None, None, None, None])  # then it comes
    one(store := HashStore(), 1).say(NodeEnd(FINISHED))
    one(store).leave([0, 1], lambda: next(signals, 15) is not None)
