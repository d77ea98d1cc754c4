"""The node is lost that hosts the rendezvous, or the workers' store: the others bring all they hold to disk, say what
has happened, and leave with 75 where they cannot meet. The same command goes on from there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job
from tests.system.conftest import Plain
from tests.system.nodes import Nodes
from tests.system.test_lost_nodes import STEP_S, held, kill_node, release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

THREE = ("--size", 144, *STEP_S)
GONE = r"ERROR the job has failed: (.*); then the rendezvous at (\S+) is gone with its host, .*; exit code 75"


def leave(nodes: Nodes, others: list[Job]) -> None:
    """They have saved step 8, said why in one line, and left."""
    for job in others:
        assert job.wait(400) == 75, nodes.report()
        assert len(job.matches(GONE)) == 1, nodes.report()
    assert any((nodes.folder / "job").rglob("*_8_breakpoint.safetensors")), nodes.report()


def begin_again(nodes: Nodes, num_nodes: int) -> None:
    again = [nodes.start(hosts=number == 0) for number in range(num_nodes)]
    for job in again:
        assert job.wait(400) == 0, nodes.report()
        assert not job.matches(r"^READY \d+ \d+ (?!8$)"), nodes.report()


@pytest.mark.parametrize(
    ("num_nodes", "host"), [(3, 0), pytest.param(3, 2, marks=drill), pytest.param(2, 1, marks=drill)]
)
def test_the_others_save_say_why_and_leave_and_the_same_command_goes_on(
    tmp_path: Path, plain: Plain, num_nodes: int, host: int
) -> None:
    """No step is lost; the random numbers of the lost rank went with its machine's memory, and a warning says so."""
    with ExitStack() as stack:
        args = ("--epochs", 2, *THREE, "--hold-at", 8)
        nodes = Nodes(stack, tmp_path / "hurt", num_nodes, 1, *args, host=host)
        held(nodes)
        lost = nodes.jobs[host]
        others = [job for job in nodes.jobs if job is not lost]
        kill_node(lost)
        release(nodes)
        leave(nodes, others)
        begin_again(nodes, num_nodes)
        assert nodes.end[1] == plain(num_nodes, "--size", 144)[1], nodes.report()
        assert nodes.found("not bit for bit|may differ"), nodes.report()
