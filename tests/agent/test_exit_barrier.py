"""How the nodes of an attempt end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from mindx_elastic.agent import exit_barrier as module
from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.exit_barrier import FINISHED, LOST, ExitBarrier, NodeEnd, end_together, wait_for_all
from mindx_elastic.core.status_page import Status
from tests.checkpoint_files import write_step


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
    one(store, 1).say(NodeEnd("failed", "rank 1: killed by SIGKILL", again=True))
    ends = wait(one(store))
    assert ends[1] == NodeEnd("failed", "rank 1: killed by SIGKILL", again=True)
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


def test_a_store_that_is_lost_without_a_node_is_waited_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOST_S", 0.2)
    assert outcomes(wait(one(Gone()))) == {0: FINISHED, 1: LOST}


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


@pytest.mark.parametrize("text", ["{", "[]", "7", "{}", "[" * 10_000])
def test_an_end_that_makes_no_sense_is_none_of_a_finished_training(text: str) -> None:
    store = HashStore()
    store.set("mindx/end/1", text)
    assert outcomes(wait(one(store))) == {0: FINISHED, 1: "failed"}


def test_one_opinion_counts_for_all() -> None:
    store = HashStore()
    assert [one(store).settle(False), one(store, 1).settle(True)] == [False, False]
    assert [one(Gone()).settle(False), one(Gone()).settle(True)] == [False, True], "each alone without a store"


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
GONE = "node 1 gives no sign of life"


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEEN_S", 0.0)


def end(store: Any, *directories: Path, step: int = 24, lost: Any = dict, node: int = 0) -> Ending:
    inbox: Any = SimpleNamespace(interrupting=nullcontext)
    return end_together(
        OWN,
        [Status(step=step)],
        ExitBarrier(store, node=node, num_nodes=2, world_size=2),
        lost,
        inbox=inbox,
        new_store=lambda: None,
        directories=directories,
        world_size=2,
        timeout_s=60.0,
    )


def told(other: NodeEnd, node: int = 1) -> HashStore:
    store = HashStore()
    ExitBarrier(store, node=node, num_nodes=2, world_size=2).say(other)
    return store


def test_all_have_finished() -> None:
    assert end(told(NodeEnd(FINISHED))) == OWN


@pytest.mark.parametrize(
    ("theirs", "ours"), [("failed", "failed"), ("membership", "membership"), ("grown", "membership")]
)
def test_one_that_meets_the_others_again_takes_all_with_it(theirs: str, ours: str) -> None:
    found = end(told(NodeEnd(theirs, "rank 1: killed by SIGKILL", again=True)))
    assert (found.outcome, found.code, found.cause) == (ours, 75, "node 1: rank 1: killed by SIGKILL")
    assert found.elsewhere


def test_the_end_is_on_disk_so_the_job_has_finished_without_the_lost_node(tmp_path: Path) -> None:
    write_step(tmp_path, 24)
    found = end(told(NodeEnd(LOST, GONE)), tmp_path)
    assert (found.outcome, found.code) == (FINISHED, 0)
    assert found.cause == (
        "node 1 gives no sign of life; step 24, the end of the training, is complete in "
        f"{tmp_path}, but what node 1 did behind it (an export, say) may be missing"
    )


def test_the_end_is_not_on_disk_so_the_job_has_failed(tmp_path: Path) -> None:
    write_step(tmp_path, 20)
    found = end(told(NodeEnd("stopped", "SIGTERM")), tmp_path)
    assert (found.outcome, found.code) == ("failed", 75)
    assert found.cause == (
        f"node 1 has stopped (SIGTERM); step 24, the end of the training, is not complete in {tmp_path}"
    )


def test_the_first_opinion_counts(tmp_path: Path) -> None:
    """Each node may see a disk of its own."""
    write_step(tmp_path, 24)
    store = told(NodeEnd(LOST, "lost"))
    assert not ExitBarrier(store, node=1, num_nodes=2, world_size=2).settle(False)
    assert end(store, tmp_path).outcome == "failed"


@pytest.mark.parametrize("step", [24, -1])
def test_where_no_guard_tells_where_its_checkpoints_are_nothing_is_said_of_them(step: int) -> None:
    found = end(told(NodeEnd(LOST, "node 1 gives no sign of life")), step=step)
    assert found.cause == "node 1 gives no sign of life; what node 1 did behind it (an export, say) may be missing"
    assert found.outcome == FINISHED


def test_a_node_that_was_given_up_and_comes_late_ends_as_the_others_have(tmp_path: Path) -> None:
    write_step(tmp_path, 24)
    store = told(NodeEnd(FINISHED), node=0)
    ExitBarrier(store, node=0, num_nodes=2, world_size=2).say(NodeEnd(LOST, "its agent is silent"), 1)
    assert end(store, tmp_path, node=1) == OWN
    again = told(NodeEnd(FINISHED), node=0)
    first = ExitBarrier(again, node=0, num_nodes=2, world_size=2)
    first.say(NodeEnd(LOST, "its agent is silent"), 1)
    first.settle(False)
    found = end(again, tmp_path, node=1)
    assert found.outcome == "failed" and found.cause.startswith("this node was taken for lost when its training ended;")


def test_a_loss_that_is_seen_meanwhile(tmp_path: Path) -> None:
    write_step(tmp_path, 24)
    found = end(HashStore(), tmp_path, lost=lambda: {1: GONE})
    assert found.outcome == FINISHED and GONE in found.cause


@pytest.mark.parametrize("complete", [True, False])
def test_without_the_store_the_disk_tells_whether_the_job_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    monkeypatch.setattr(module, "_LOST_S", 0.1)
    if complete:
        write_step(tmp_path, 24)
    found = end(Gone(), tmp_path)
    assert found.outcome == (FINISHED if complete else "failed")
    assert "of node 1 nothing is known: the store of the rendezvous is gone" in found.cause
