"""Several nodes, and a rank or a node is lost while the job is paused."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.harness import Job, start_command, wait_until
from tests.system.conftest import Plain
from tests.system.nodes import Nodes
from tests.system.test_lost_nodes import STEP_S, check, held, kill_node, release
from tests.system.test_pause import pages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.drill]


def run_dir(nodes: Nodes, job: Job) -> Path:
    return nodes.folder / f"node{nodes.jobs.index(job)}" / "run"


@contextmanager
def paused(nodes: Nodes, job: Job) -> Iterator[int]:
    """The ranks, which hold, wait at one step; in the block. They are let go behind it."""
    with start_command("pause", run_dir(nodes, job)) as pause:
        runs = [run_dir(nodes, each) for each in nodes.jobs]
        wait_until(lambda: all(page.pause_order == 1 for run in runs for page in pages(run)), "the order", 100)
        release(nodes)
        assert pause.wait() == 0, pause.report()
        match = re.search(r"paused at step (\d+)", pause.report())
    assert match is not None
    yield int(match[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_in_a_pause(tmp_path: Path, plain: Plain, rank: int) -> None:
    """The job is restarted, which ends the pause: all train on from its step."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, "--hold-at", 8)
        by_rank = held(nodes)
        with paused(nodes, by_rank[0]) as step:
            os.kill(by_rank[rank].pids()[rank], signal.SIGKILL)
        nodes.expect(0)
        assert nodes.end == plain(2), nodes.report()
        assert {int(match[1]) for match in nodes.found(r"resumed from .*: step (\d+) ")} == {step}, nodes.report()
        assert nodes.found(rf"the pause at step {step} has ended"), nodes.report()


def test_a_node_is_lost_in_a_pause(tmp_path: Path, plain: Plain) -> None:
    """Another one takes its place, and all train on from the step of the pause."""
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, "--epochs", 2, *STEP_S, "--hold-at", 8)
        by_rank = held(nodes)
        survivor = by_rank[0]
        with paused(nodes, survivor) as step:
            kill_node(by_rank[1])
        survivor.wait_for("restart 1", 1, 200)
        new = nodes.start()
        assert survivor.wait(400) == 0 and new.wait(400) == 0, nodes.report()
        check(nodes, [survivor], plain(2))
        assert survivor.matches(rf"the pause at step {step} has ended"), nodes.report()
