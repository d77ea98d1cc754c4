"""Several ranks in one process, each with a disk of its own and a mirror, over a board instead of a store."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mindx_elastic.agreement.gather import meet
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo, RedundancySettings
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.saver import Saver
from mindx_elastic.mirror.mirror import Mirror, NodesPart
from mindx_elastic.mirror.partners import all_partners
from mindx_elastic.mirror.wire import Endpoint
from mindx_elastic.start.restore import Resumed
from tests.checkpoint_files import flip_bit_in_data, write
from tests.harness import wait_until
from tests.jobs.kit import Every
from tests.start.finding import find_and_read
from tests.start.shared_store import on_all_ranks

NAME = "resnet-2_7.safetensors"


class Job:
    """All ranks of a job; `nodes` names the node of each. Node k's disk is ``folder/k``."""

    def __init__(self, folder: Path, nodes: Sequence[str], copies: Sequence[int] | int = 2) -> None:
        self.folder, self.nodes = folder, nodes
        self.world_size = len(nodes)
        self._copies = [copies] * self.world_size if isinstance(copies, int) else list(copies)
        self.mirrors: list[Any] = []
        for node in nodes:
            (folder / node).mkdir(exist_ok=True)

    def root(self, rank: int) -> Path:
        return self.folder / self.nodes[rank]

    def info(self, rank: int) -> RankInfo:
        return RankInfo(rank=rank, world_size=self.world_size)

    def open(self) -> list[Mirror]:
        def work(rank: int, exchange: Any) -> Mirror | None:
            settings = RedundancySettings(copies=self._copies[rank], node=self.nodes[rank])
            events = EventLog(self.root(rank) / "events.jsonl", run_id="run-a", rank=rank)
            nodes = NodesPart(settings, self.info(rank), "127.0.0.1")
            meet(exchange, "here", [nodes])
            mirror = nodes.open_mirror([self.root(rank)], exchange, events)
            if mirror is not None:
                meet(exchange, "plan", [mirror.endpoints])
                mirror.greet()
            return mirror

        self.mirrors = on_all_ranks(self.world_size, work)
        return self.mirrors

    def close(self) -> None:
        for mirror in self.mirrors:
            if isinstance(mirror, Mirror):
                mirror.close()
        self.mirrors = []

    def write(self, rank: int, name: str = NAME, **fields: Any) -> Path:
        path = self.root(rank) / f"rank_{rank}" / name
        return write(path, **{"rank": rank, "world_size": self.world_size, **fields})

    def files(self, node: str) -> list[str]:
        root = self.folder / node
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name.count(".safetensors"))

    def events(self, rank: int) -> list[dict[str, Any]]:
        lines = (self.root(rank) / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["rank"] == rank]

    def find(self) -> list[Any]:
        """What every rank resumes from."""

        def work(rank: int, exchange: Any) -> Resumed | None:
            return find_and_read(
                [self.root(rank)], self.info(rank), exchange, resume="auto", transport=self.mirrors[rank]
            )

        return on_all_ranks(self.world_size, work)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:

        def make(nodes: Sequence[str], copies: Sequence[int] | int = 2) -> Job:
            job = Job(tmp_path, nodes, copies)
            stack.callback(job.close)
            job.open()
            return job

        yield make
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("mindx-mirror")]
    assert left == []


def deliver(job: Job, paths: dict[int, Path], time_left_s: float = 30.0) -> None:
    """All ranks save for the last time, at once."""

    def work(rank: int, exchange: Any) -> None:
        if rank in paths:
            job.mirrors[rank].deliver(paths[rank], 17, time_left_s)

    assert not any(on_all_ranks(job.world_size, work))


def finish(job: Job) -> None:
    """The training ends, on all ranks at once."""
    assert not any(on_all_ranks(job.world_size, lambda rank, exchange: job.mirrors[rank].finish(None)))


def steps(found: Sequence[Any]) -> list[int]:
    errors = [one for one in found if isinstance(one, Exception)]
    if errors:
        raise errors[0]
    return [one.checkpoint.info.step for one in found]


def test_last_files_lie_on_two_nodes_and_survive_either(start: Callable[..., Job]) -> None:
    job = start("aabb")
    deliver(job, {rank: job.write(rank) for rank in range(4)})
    everything = [f"rank_{rank}/{NAME}" for rank in range(4)]
    assert (job.files("a"), job.files("b")) == (everything, everything)
    assert [(e["event"], e["outcome"], e["partner"]) for e in job.events(1)] == [("mirror", "copied", 3)]


def test_a_dead_partner_costs_one_warning(start: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    job = start("ab")
    job.mirrors[1].close()
    first, second = job.write(0, "resnet-1_1.safetensors", step=1), job.write(0, "resnet-1_2.safetensors", step=2)
    with caplog.at_level(logging.WARNING, "mindx_elastic"):
        job.mirrors[0].submit(first, 1)
        deliver(job, {0: second}, time_left_s=5.0)
        wait_until(lambda: len(job.events(0)) == 2, "the events of both files")
    assert [record.message.partition(":")[0] for record in caplog.records] == ["rank 1 at 127.0.0.1"]
    assert [event["outcome"].partition(":")[0] for event in job.events(0)] == ["failed", "failed"]
    assert len(job.files("a")) == 2


def test_a_frozen_partner_does_not_cost_all_the_time_that_is_left(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindx_elastic.mirror.mirror._FIRST_ANSWER_S", 0.2)
    job = start("ab")
    mirror: Mirror = job.mirrors[0]
    job.mirrors[1].close()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, nobody answers
        mirror.endpoints._known[1] = Endpoint("127.0.0.1", silent.getsockname()[1], "x")
        mirror.deliver(job.write(0), 17, 3600.0)  # all of it would be more than this test has
    assert [event["outcome"].partition(":")[0] for event in job.events(0)] == ["failed"]


def test_retention_deletes_copies_too(start: Callable[..., Job]) -> None:
    job = start("ab")
    info, mirror = job.info(0), job.mirrors[0]
    collector = Collector({"model": nn.Linear(2, 2)})
    saver = Saver(collector, info, EventLog(job.root(0) / "events.jsonl", run_id="run-a"))
    saver.mirror = mirror
    policy = Every(job.root(0), keep_max=1)
    for step in range(1, 7):
        collector.copy(Position(step, 1, step, 10))
        assert saver.save_periodic(policy)
    finish(job)
    # The other rank has nothing of any step: the two newest may become whole yet.
    assert job.files("a") == job.files("b") == ["rank_0/every-1_5.safetensors", "rank_0/every-1_6.safetensors"]


def test_a_lost_disk_is_filled_from_the_others(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("aabb")
    for step in (7, 17):
        deliver_all = {rank: job.write(rank, f"resnet-1_{step}.safetensors", step=step) for rank in range(4)}
        for rank, path in deliver_all.items():
            job.mirrors[rank].submit(path, step)
    finish(job)
    job.close()
    for path in (tmp_path / "b").rglob("*.safetensors"):
        path.unlink()
    job.open()
    found = job.find()
    assert steps(found) == [17] * 4
    assert [one.checkpoint.info.rank for one in found] == [0, 1, 2, 3]
    assert [one.donor for one in found] == [None] * 4
    # Only what was needed has been moved.
    assert job.files("b") == ["rank_2/resnet-1_17.safetensors", "rank_3/resnet-1_17.safetensors"]


def test_a_damaged_copy_is_put_aside_and_the_older_step_taken(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("ab")
    for step in (7, 17):
        for rank in range(2):
            job.mirrors[rank].submit(job.write(rank, f"resnet-1_{step}.safetensors", step=step), step)
    finish(job)
    for path in (tmp_path / "b").rglob("*.safetensors"):
        path.unlink()
    flip_bit_in_data(tmp_path / "a" / "rank_1" / "resnet-1_17.safetensors")
    found = job.find()
    assert steps(found) == [7, 7]
    assert any(line.startswith("rank 1: resnet-1_17.safetensors is damaged") for line in found[0].rejected)


def test_ranks_that_disagree_are_told_so(start: Callable[..., Job]) -> None:
    found = start("ab", [2, 1]).mirrors
    assert isinstance(found[0], UsageError)
    assert "redundancy=2 on rank 0 and 1 on rank 1" in str(found[0])
    assert isinstance(found[1], UsageError), "it must not go on alone"


def test_partners_and_sources_are_known_when_the_store_is_asked_no_more(start: Callable[..., Job]) -> None:
    """A dying job's store may be gone: to ask it then would cost the stop its file, or block."""
    job = start("abcd")
    for mirror in job.mirrors:
        mirror.endpoints.close()
    for rank, mirror in enumerate(job.mirrors):
        neighbours = {(rank + 1) % 4, (rank - 1) % 4}
        assert {*mirror.partners, *(other for other in range(4) if rank in job.mirrors[other].partners)} == neighbours
        known = {other for other in set(range(4)) - {rank} if mirror.endpoints[other] is not None}
        assert known == neighbours, "and the store is not asked for the fourth rank"


# --- who keeps whose copies ---


nodes_and_copies = st.tuples(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=16), st.integers(1, 6)
)


@given(nodes_and_copies)
def test_a_file_lies_on_as_many_nodes_as_asked_for_or_as_there_are(case: tuple[list[str], int]) -> None:
    nodes, copies = case
    for rank, partners in enumerate(all_partners(nodes, copies)):
        holders = {nodes[other] for other in [rank, *partners]}
        assert len(holders) == len(partners) + 1 == min(copies, len(set(nodes)))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))
def test_equal_nodes_share_the_work_equally(num_nodes: int, per_node: int, copies: int) -> None:
    nodes = [str(rank // per_node) for rank in range(num_nodes * per_node)]
    kept = Counter(partner for partners in all_partners(nodes, copies) for partner in partners)
    assert {kept[rank] for rank in range(len(nodes))} == {min(copies, num_nodes) - 1}
