"""Three "nodes" on one machine, each with a disk and a memory of its own; nodes are lost with all that is on them. The
ranks are FSDP's: none holds what another one does."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from mindx_elastic.memory.arena import COPY_FILE, read_records
from tests.harness import Job, wait_until
from tests.system.conftest import Uninterrupted
from tests.system.nodes import Nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of torch 2.6 cannot train on CPUs"),
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


class Cluster(Nodes):
    """Three nodes; behind every third step the job waits until the test lets it `pass_gate`."""

    def __init__(self, stack: ExitStack, folder: Path, *args: object, own_disks: bool = True) -> None:
        self.gates = folder / "gates"
        self.gates.mkdir()
        args = ("--gates", self.gates, *args)
        options, env = ("--snapshot-every", "1"), {"MINDX_REDUNDANCY": "2"}
        super().__init__(stack, folder, 3, 1, *args, options=options, script="fsdp.py", env=env, own_disks=own_disks)

    def place(self, job: Job) -> Path:
        """All that a node has."""
        return self.folder / f"node{self.jobs.index(job)}"

    @property
    def alive(self) -> list[Job]:
        return [job for job in self.jobs if job.process.poll() is None]

    def wait_at(self, step: int) -> None:
        """All ranks are there."""
        wait_until(lambda: all(self.found(f"AT {rank} {step}$") for rank in range(3)), f"step {step}", 200)

    def wait_for_copies(self, step: int, ranks: Sequence[int] = (0, 1, 2)) -> None:
        """Their snapshots are with their neighbours."""
        wait_until(lambda: self.copies(step).issuperset(ranks), f"copies of step {step}", 100)

    def copies(self, step: int) -> set[int]:
        """The ranks of which some other node has this step."""
        marks = [path for job in self.alive for path in self.place(job).glob(f"shm/*/*/rank_*/{COPY_FILE}")]
        found = [m.parent for m in marks if any(r.state and r.step == step for r in read_records(m.parent))]
        return {int(folder.name.removeprefix("rank_")) for folder in found}

    def lose(self, rank: int) -> None:
        """The node of this rank, with its memory and what it has on its disk."""
        (job,) = [job for job in self.alive if job.matches(r"READY (\d+)")[-1][1] == str(rank)]
        pid = int(job.matches(r"READY \d+ (\d+)")[-1][1])
        job.process.kill()
        os.kill(pid, signal.SIGKILL)
        job.process.wait()
        shutil.rmtree(self.place(job))

    def pass_gate(self, step: int) -> None:
        (self.gates / str(step)).touch()

    def wait_for_start(self, step: int) -> None:
        """All ranks have gone on from `step`."""
        wait_until(lambda: len(self.found(rf"READY \d+ \d+ {step}$")) == 3, f"a start from step {step}", 300)

    def check_end(self, reference: Job, code: int = 0) -> None:
        for job in self.alive:
            assert job.wait(400) == code, self.report()
        if code == 0:
            assert self.end[0] == reference.hashes(), self.report()
        assert not self.found("WARNING.*(not bit for bit|may differ)"), self.report()
        left = [path for job in self.jobs if (own := self.place(job)).exists() for path in own.glob("shm/*/*")]
        assert left == [], "memory that a job has left"


@pytest.mark.drill
def test_each_node_is_lost_in_turn_and_no_step(tmp_path: Path, uninterrupted: Uninterrupted, stack: ExitStack) -> None:
    nodes = Cluster(stack, tmp_path)
    for rank, step in enumerate((3, 6, 9)):
        nodes.wait_at(step)
        nodes.wait_for_copies(step)
        nodes.lose(rank)
        nodes.start()
        nodes.pass_gate(step)
        nodes.wait_for_start(step)
    nodes.pass_gate(12)
    nodes.check_end(uninterrupted("fsdp.py", 3))
    assert nodes.found("takes its file of step 3 from rank"), nodes.report()


def test_a_node_lost_in_the_middle_of_a_copy_costs_one_step(
    tmp_path: Path, uninterrupted: Uninterrupted, stack: ExitStack
) -> None:
    nodes = Cluster(stack, tmp_path, "--half-a-copy", "0:6")
    nodes.pass_gate(3)
    nodes.wait_at(6)
    wait_until(lambda: nodes.found("^HALF 0 6$"), "half a copy", 100)
    nodes.lose(0)
    nodes.start()
    nodes.pass_gate(6)
    nodes.wait_for_start(5)
    for step in (9, 12):
        nodes.pass_gate(step)
    nodes.check_end(uninterrupted("fsdp.py", 3))


@pytest.mark.drill
def test_a_job_that_is_stopped_in_the_middle_of_a_copy_leaves_no_memory(
    tmp_path: Path, uninterrupted: Uninterrupted, stack: ExitStack
) -> None:
    nodes = Cluster(stack, tmp_path, "--half-a-copy", "0:6")
    nodes.pass_gate(3)
    nodes.wait_at(6)
    wait_until(lambda: nodes.found("^HALF 0 6$"), "half a copy", 100)
    nodes.jobs[1].process.send_signal(signal.SIGTERM)
    nodes.pass_gate(6)
    nodes.check_end(uninterrupted("fsdp.py", 3), 143)


@pytest.mark.drill
def test_a_partner_that_does_not_answer_costs_a_warning_and_no_step(
    tmp_path: Path, uninterrupted: Uninterrupted, stack: ExitStack
) -> None:
    """The training goes on; the copies do, too, when the partner answers again."""
    nodes = Cluster(stack, tmp_path, "--hanging-copies", "1:4")
    nodes.pass_gate(3)
    nodes.wait_at(6)
    wait_until(lambda: nodes.found("^HANGS 1"), "a partner that hangs", 100)
    nodes.pass_gate(6)
    nodes.wait_at(9)
    nodes.wait_for_copies(9, (1, 2))
    wait_until(lambda: nodes.found("WARNING.* keeps no snapshots of this rank in memory"), "a warning", 100)
    assert 0 not in nodes.copies(9)
    (nodes.gates / "go").touch()
    nodes.pass_gate(9)
    nodes.wait_at(12)
    nodes.wait_for_copies(12)
    nodes.lose(0)
    nodes.start()
    nodes.pass_gate(12)
    nodes.wait_for_start(12)
    nodes.check_end(uninterrupted("fsdp.py", 3))
    assert len(nodes.found("WARNING.* 1 at .* keeps no snapshots")) == 1, nodes.report()


@pytest.mark.drill
def test_where_both_copies_are_lost_the_disk_is_taken(
    tmp_path: Path, uninterrupted: Uninterrupted, stack: ExitStack
) -> None:
    nodes = Cluster(stack, tmp_path, "--every", 4, own_disks=False)
    nodes.pass_gate(3)
    nodes.wait_at(6)
    nodes.wait_for_copies(6)
    nodes.lose(0)
    nodes.lose(1)
    nodes.start()
    nodes.start()
    for step in (6, 9, 12):
        nodes.pass_gate(step)
    nodes.wait_for_start(4)
    nodes.check_end(uninterrupted("fsdp.py", 3))
    assert nodes.found("step 6 is not used: .*no usable file of rank"), nodes.report()
