"""Two "nodes" on one machine, each with a disk and a memory of its own; one of them is lost, with everything on it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.harness import Job, events, free_port, start_job
from tests.system.conftest import Uninterrupted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of torch 2.6 cannot train on CPUs"),
]


def disk(folder: Path, node: int) -> Path:
    return folder / f"node_{node}" / "checkpoints"


@contextmanager
def start_nodes(folder: Path, *args: object, per_node: int = 1) -> Iterator[list[Job]]:
    """Two nodes, started by hand as a platform would; a job a rank."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(2 * per_node)}
    with ExitStack() as stack:
        jobs = []
        for rank in range(2 * per_node):
            node = rank // per_node
            memory = folder / f"node_{node}" / "memory"
            memory.mkdir(parents=True, exist_ok=True)
            env = {
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_node),
                "GROUP_RANK": str(node),
                "MINDX_ARENA_DIR": str(memory),
                "MINDX_REDUNDANCY": "2",
            }
            jobs.append(stack.enter_context(start_job("fsdp.py", disk(folder, node), *args, env=env)))
        yield jobs


def lose(folder: Path, node: int) -> None:
    shutil.rmtree(folder / f"node_{node}")


def hashes(jobs: list[Job]) -> dict[int, str]:
    """Final weights of the ranks, once all have finished."""
    return {rank: job.expect(0).hashes()[rank] for rank, job in enumerate(jobs)}


def resumed_from(jobs: list[Job]) -> set[str]:
    return {job.wait_for(r"READY \d+ \d+ (\w+)")[0][1] for job in jobs}


@pytest.mark.parametrize("per_node", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_a_stopped_job_survives_the_loss_of_a_node(tmp_path: Path, uninterrupted: Uninterrupted, per_node: int) -> None:
    with start_nodes(tmp_path, "--hold-at", 5, per_node=per_node) as jobs:
        for job in jobs:
            job.wait_for("HOLD")
        jobs[0].process.send_signal(signal.SIGTERM)
        for job in jobs:
            job.expect(143)
    copied = events(disk(tmp_path, 0), "mirror") + events(disk(tmp_path, 1), "mirror")
    assert sorted((e["rank"], e["outcome"]) for e in copied) == [(r, "copied") for r in range(2 * per_node)]
    (step,) = {event["step"] for event in copied}

    lose(tmp_path, 1)
    with start_nodes(tmp_path, per_node=per_node) as jobs:
        assert resumed_from(jobs) == {str(step)}
        assert hashes(jobs) == uninterrupted("fsdp.py", 2 * per_node).hashes()
        for rank in range(per_node, 2 * per_node):
            jobs[rank].wait_for(rf"takes its file of step {step} from rank")
    # The new node keeps copies of what the other one has, before anything new is saved.
    assert all(list((disk(tmp_path, 1) / f"rank_{rank}").glob("*.safetensors")) for rank in range(2 * per_node))
