"""What the end of the other nodes means for one whose ranks have finished."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from mindx_elastic.agent import farewell as farewell_module
from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.farewell import FINISHED, LOST, Farewell, NodeEnd
from mindx_elastic.agent.lifeline import Gone
from mindx_elastic.agent.nodes_end import Signs, end_together
from mindx_elastic.core.status_page import Status
from tests.checkpoint_files import write_step

OWN = Ending(outcome=FINISHED, code=0)
GONE = Gone(1, "host, pid 7", "", (1,), is_silent=False)


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell_module, "_SEEN_S", 0.0)


def end(store: Any, *directories: Path, step: int = 24, signs: Signs | None = None, node: int = 0) -> Ending:
    inbox: Any = SimpleNamespace(interrupting=nullcontext)
    return end_together(
        OWN,
        [Status(step=step)],
        Farewell(store, node=node, num_nodes=2, world_size=2),
        signs or Signs(node, None, None),
        inbox=inbox,
        new_store=lambda: None,
        directories=directories,
        world_size=2,
        timeout_s=60.0,
    )


def told(other: NodeEnd, node: int = 1) -> HashStore:
    store = HashStore()
    Farewell(store, node=node, num_nodes=2, world_size=2).say(other)
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
    found = end(told(NodeEnd(LOST, GONE.words)), tmp_path)
    assert (found.outcome, found.code) == (FINISHED, 0)
    assert found.cause == (
        "node 1 (host, pid 7) is lost: its agent is gone; step 24, the end of the training, is complete in "
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
    assert not Farewell(store, node=1, num_nodes=2, world_size=2).settle(False)
    assert end(store, tmp_path).outcome == "failed"


@pytest.mark.parametrize("step", [24, -1])
def test_where_no_guard_tells_where_its_checkpoints_are_nothing_is_said_of_them(step: int) -> None:
    found = end(told(NodeEnd(LOST, "node 1 gives no sign of life")), step=step)
    assert found.cause == "node 1 gives no sign of life; what node 1 did behind it (an export, say) may be missing"
    assert found.outcome == FINISHED


def test_a_node_that_was_given_up_and_comes_late_ends_as_the_others_have(tmp_path: Path) -> None:
    write_step(tmp_path, 24)
    store = told(NodeEnd(FINISHED), node=0)
    Farewell(store, node=0, num_nodes=2, world_size=2).say(NodeEnd(LOST, "its agent is silent"), 1)
    assert end(store, tmp_path, node=1) == OWN
    again = told(NodeEnd(FINISHED), node=0)
    first = Farewell(again, node=0, num_nodes=2, world_size=2)
    first.say(NodeEnd(LOST, "its agent is silent"), 1)
    first.settle(False)
    found = end(again, tmp_path, node=1)
    assert found.outcome == "failed" and found.cause.startswith("this node was taken for lost when its training ended;")


def test_a_connection_counts_for_more_than_a_heartbeat() -> None:
    """As where the store stood still for a while."""
    nodes: Any = SimpleNamespace(heard={2}, lost={3: "node 3 is lost"}, gone=lambda: [GONE])
    membership: Any = SimpleNamespace(missing=frozenset({0, 2, 4}))
    found = {1: GONE.words, 3: "node 3 is lost", 4: "node 4 gives no sign of life"}
    assert Signs(0, nodes, membership).missing() == found
    assert sorted(Signs(0, None, membership).missing()) == [2, 4]
    assert Signs(0, None, None).missing() == {}


def test_a_loss_that_is_seen_meanwhile(tmp_path: Path) -> None:
    write_step(tmp_path, 24)
    nodes: Any = SimpleNamespace(heard=set(), lost={}, gone=lambda: [GONE])
    found = end(HashStore(), tmp_path, signs=Signs(0, nodes, None))
    assert found.outcome == FINISHED and GONE.words in found.cause
