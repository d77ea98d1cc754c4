"""Real jobs on a real GPU: stops, kills and recoveries, bit for bit. Several ranks share the first GPU over NCCL, see
``jobs/on_gpu.py``."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from mindx_elastic.core.pinned import PinnedMemory
from tests.harness import Job, start_agent, start_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

JOB = "on_gpu.py"
PLACES = ("start", "forward", "mid", "backward", "update", "after")
Hashes = Callable[..., dict[int, str]]


@pytest.fixture(scope="session")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> Hashes:
    """``hashes(ranks, *args)``: of the uninterrupted run with these arguments, made once for all workers of pytest."""
    folder = tmp_path_factory.getbasetemp()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "uninterrupted"
    shared.mkdir(exist_ok=True)

    def run(ranks: int, *args: object) -> dict[int, str]:
        place = shared / "-".join(map(str, (ranks, *args)))
        with open(f"{place}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (known := place.with_suffix(".json")).exists():
                with start_job(JOB, place, *args, ranks=ranks, env={"MINDX_ARENA_DIR": "none"}) as job:
                    found = job.expect(0).hashes()
                assert len(found) == ranks
                known.write_text(json.dumps(found))
            return {int(rank): digest for rank, digest in json.loads(known.read_text()).items()}

    return run


def under_agent(folder: Path, ranks: int, fault: str, *args: object, options: Sequence[object], **env: str) -> Job:
    """A finished job under the agent, in which the fault has fired, once."""
    words, more = (folder, *args, "--fault", fault), ["--standalone", *map(str, options)]
    with start_agent(JOB, *words, ranks=ranks, options=more, run_dir=folder / "run", env=env) as job:
        job.expect(0)
    rank, step, place, *_ = fault.split(":")
    assert job.matches(f"FAULT {rank} {step} {place}"), job.report()
    return job


def steps_of_restart(job: Job, ranks: int) -> set[int]:
    """Where the ranks went on from."""
    steps = job.resumed()[ranks:]
    assert len(steps) == ranks and "None" not in steps, job.report()
    return {int(step) for step in steps}


def stop_and_resume(folder: Path, ranks: int, fault: str, *args: object) -> Job:
    """A rank gets a SIGTERM in the step; all stop at its end, or at that of the next one."""
    step = int(fault.split(":")[1])
    with start_job(JOB, folder, *args, "--fault", fault, ranks=ranks) as job:
        job.wait()
    assert job.matches("^FAULT "), job.report()
    with start_job(JOB, folder, *args, ranks=ranks) as job:
        job.expect(0)
    assert len(job.resumed()) == ranks and set(job.resumed()) <= {str(step), str(step + 1)}, job.report()
    return job


# --- one rank ---


@pytest.mark.parametrize(
    "options",
    [(), ("--precision", "fp16"), ("--precision", "bf16"), ("--num-workers", 2), ("--compile", "model")],
    ids=["fp32", "fp16", "bf16", "workers", "compiled"],
)
def test_a_stop_in_mid_step(tmp_path: Path, hashes: Hashes, options: Sequence[object]) -> None:
    job = stop_and_resume(tmp_path, 1, "0:30:backward:term", *options)
    assert job.hashes() == hashes(1, *options), job.report()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_boundary_does_not_wait_for_the_device(tmp_path: Path, precision: str) -> None:
    """But for the looks at the first steps, at steps that are powers of two, and at two in fifty."""
    with start_job(JOB, tmp_path, "--precision", precision, "--tell-syncs", env={"MINDX_ARENA_DIR": "none"}) as job:
        job.expect(0)
    waiting = {int(match[1]) for match in job.matches(r"SYNC 0 (\d+) ")}
    assert not waiting & {*range(9, 16), *range(17, 32), *range(33, 49)}, job.report()


@pytest.mark.parametrize("place", ["mid", "update", "after"])
def test_a_killed_rank_goes_on_from_its_snapshot(tmp_path: Path, hashes: Hashes, place: str) -> None:
    options = ("--precision", "fp16", "--megabytes", 64)
    job = under_agent(tmp_path, 1, f"0:30:{place}:kill", *options, options=["--snapshot-every", 1])
    assert steps_of_restart(job, 1) == {30 if place == "after" else 29}, job.report()
    assert job.hashes() == hashes(1, *options), job.report()


# --- several ranks over NCCL ---


@pytest.mark.parametrize(
    ("fault", "options"), [("1:15:backward:term", ()), ("0:15:backward:term", ("--shard", "fsdp"))]
)
def test_all_ranks_stop_at_one_step(tmp_path: Path, hashes: Hashes, fault: str, options: Sequence[object]) -> None:
    job = stop_and_resume(tmp_path, 2, fault, *options)
    assert len(set(job.resumed())) == 1 and job.hashes() == hashes(2, *options), job.report()


SHORT = ("--size", 48, "--epochs", 2)


@pytest.mark.parametrize(
    ("fault", "options", "snapshots"),
    [
        *((f"1:15:{place}:kill", ("--precision", "fp32"), 0) for place in PLACES),
        *((f"1:15:{place}:kill", ("--precision", "fp16"), 0) for place in ("mid", "update")),
        # CUDA's queue takes about a thousand kernels. Behind an all-reduce that does not end it fills up, and the
        # program stands still in the middle of the next forward, or of an update.
        ("1:8:mid:kill", ("--depth", 400, *SHORT), 0),
        ("1:8:mid:kill", ("--depth", 60, "--plain-optimizer", *SHORT), 0),
        # FSDP2: a killed rank's part is in its snapshot.
        *((fault, ("--shard", "fsdp"), 1) for fault in ("1:15:mid:kill", "0:15:update:kill", "1:15:after:kill")),
        # The copier waits for a boundary that the device never comes to; the dying save does not wait for the copier.
        *((f"1:8:{place}:kill", ("--megabytes", 64, *SHORT), 1) for place in ("mid", "update", "after")),
        ("0:15:mid:kill", (), 1),  # snapshots keep the buffers of rank 0
    ],
)
def test_a_killed_rank_costs_nothing_that_the_devices_had_done(
    tmp_path: Path, hashes: Hashes, fault: str, options: Sequence[object], snapshots: int
) -> None:
    """The survivor's program has passed boundaries that its device never comes to: it saves the one that is there."""
    job = under_agent(tmp_path, 2, fault, *options, options=["--snapshot-every", snapshots])
    step = int(fault.split(":")[1])
    assert steps_of_restart(job, 2) <= set(range(step - 3, step + 1)), job.report()
    assert not job.matches("is not gone after") and not job.matches("not bit for bit"), job.report()
    assert job.hashes() == hashes(2, *options), job.report()


@pytest.mark.parametrize(
    ("ranks", "fault", "options"),
    [(3, "1:12:mid:kill", ()), (2, "1:15:mid:stop", ("--hang-timeout", 8))],
    ids=["one of three is killed", "a stopped rank is found and replaced"],
)
def test_a_lost_rank_is_replaced(
    tmp_path: Path, hashes: Hashes, ranks: int, fault: str, options: Sequence[object]
) -> None:
    job = under_agent(tmp_path, ranks, fault, options=["--snapshot-every", 0, *options])
    assert steps_of_restart(job, ranks) and job.hashes() == hashes(ranks), job.report()


def test_rank_0_takes_its_buffers_along_which_is_told(tmp_path: Path) -> None:
    """DDP would have broadcast them."""
    job = under_agent(tmp_path, 2, "0:15:mid:kill", options=["--snapshot-every", 0])
    assert job.matches("its buffers on a device, .* are lost .* not bit for bit"), job.report()
    assert steps_of_restart(job, 2), job.report()


# --- in place, over NCCL ---


@pytest.mark.parametrize(("victim", "place"), [*((1, place) for place in PLACES), (0, "mid"), (0, "update")])
def test_the_survivor_keeps_its_process(tmp_path: Path, hashes: Hashes, victim: int, place: str) -> None:
    options = ["--recover", "in-place", "--rejoin-timeout", 60]
    job = under_agent(tmp_path, 2, f"{victim}:15:{place}:kill", options=options, MINDX_REJOIN_NCCL="1")
    assert job.matches(f"recovery 1 in place: rank {victim} replaced"), job.report()
    assert len(job.processes()[1 - victim]) == 1, job.report()
    if victim == 0:  # whose buffers DDP broadcasts
        assert job.matches("its buffers on a device, .* are lost .* not bit for bit"), job.report()
    else:
        assert job.hashes() == hashes(2), job.report()


# --- memory ---


def test_memory_is_page_locked_once_and_given_back() -> None:
    torch.zeros(1, device="cuda")
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    device = torch.device("cuda", 0)
    one = PinnedMemory(address, 1 << 20, device)
    other = PinnedMemory(address, 1 << 20, device)
    assert one.is_pinned and not other.is_pinned
    torch.ones(3, device="cuda").add_(1)  # the refusal is not reported to the program
    torch.cuda.synchronize()
    one.close()
    again = PinnedMemory(address, 1 << 20, device)
    assert again.is_pinned
    again.close()
