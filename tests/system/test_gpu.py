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
from typing import Any

import pytest
import torch

from mindx_elastic.core.pinned import PinnedMemory
from tests.harness import Job, events, start_agent, start_job

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


def under_agent(folder: Path, ranks: int, *args: object, options: Sequence[object], **env: str) -> Job:
    """A finished job under the agent."""
    more = ["--standalone", *map(str, options)]
    with start_agent(JOB, folder, *args, ranks=ranks, options=more, run_dir=folder / "run", env=env) as job:
        return job.expect(0)


def resumed_from(folder: Path, ranks: int) -> list[dict[str, Any]]:
    folders = [folder / "ckpt" / f"rank_{rank}" if ranks > 1 else folder / "ckpt" for rank in range(ranks)]
    roots = {each if (each / "events.jsonl").exists() else folder / "ckpt" for each in folders}
    return [event for root in sorted(roots) for event in events(root, "resume")]


# --- one rank ---


@pytest.mark.parametrize(
    "options",
    [(), ("--precision", "fp16"), ("--precision", "bf16"), ("--num-workers", 2), ("--compile",)],
    ids=["fp32", "fp16", "bf16", "workers", "compiled"],
)
def test_a_stop_in_mid_step(tmp_path: Path, hashes: Hashes, options: Sequence[object]) -> None:
    with start_job(JOB, tmp_path, *options, "--fault", "0:30:backward:term") as job:
        job.expect(143)
    assert job.matches("FAULT 0 30 backward"), job.report()
    with start_job(JOB, tmp_path, *options) as job:
        job.expect(0)
    assert job.matches(r"READY 0 \d+ 3[01]$") and job.hashes() == hashes(1, *options), job.report()


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
    job = under_agent(tmp_path, 1, *options, "--fault", f"0:30:{place}:kill", options=["--snapshot-every", 1])
    assert job.matches(f"FAULT 0 30 {place}"), job.report()
    assert job.matches(rf"READY 0 \d+ {30 if place == 'after' else 29}$"), job.report()
    assert job.hashes() == hashes(1, *options), job.report()


# --- several ranks over NCCL ---


def test_all_ranks_stop_at_one_step(tmp_path: Path, hashes: Hashes) -> None:
    with start_job(JOB, tmp_path, "--fault", "1:15:backward:term", ranks=2) as job:
        job.wait()
    assert job.matches("FAULT 1 15 backward"), job.report()
    with start_job(JOB, tmp_path, ranks=2) as job:
        job.expect(0)
    assert len(job.matches(r"READY \d \d+ 1[56]$")) == 2 and job.hashes() == hashes(2), job.report()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_rank_costs_nothing_that_the_devices_had_done(
    tmp_path: Path, hashes: Hashes, place: str, precision: str
) -> None:
    """The survivor's program has passed boundaries that its device never comes to: it saves the one that is there."""
    if precision == "fp16" and place not in ("mid", "update"):
        pytest.skip("as with fp32")
    options = ("--precision", precision)
    job = under_agent(tmp_path, 2, *options, "--fault", f"1:15:{place}:kill", options=["--snapshot-every", 0])
    assert job.matches(f"FAULT 1 15 {place}"), job.report()
    starts = job.matches(r"READY \d \d+ (\w+)$")[2:]
    assert len(starts) == 2 and all(m[1] in ("12", "13", "14", "15") for m in starts), job.report()
    assert not job.matches("is not gone after"), job.report()
    assert not job.matches("not bit for bit"), job.report()
    assert job.hashes() == hashes(2, *options), job.report()


@pytest.mark.parametrize("options", [("--depth", 400), ("--depth", 60, "--plain-optimizer")], ids=["forward", "update"])
def test_the_program_waits_for_room_in_the_devices_queue(
    tmp_path: Path, hashes: Hashes, options: Sequence[object]
) -> None:
    """CUDA's queue takes about a thousand kernels. Behind an all-reduce that does not end it fills up, and the program
    stands still in the middle of the next forward, or of an update."""
    short = (*options, "--size", 48, "--epochs", 2)
    job = under_agent(tmp_path, 2, *short, "--fault", "1:8:mid:kill", options=["--snapshot-every", 0])
    assert job.matches("FAULT 1 8 mid"), job.report()
    starts = job.matches(r"READY \d \d+ (\w+)$")[2:]
    assert len(starts) == 2 and all(m[1] in ("5", "6", "7") for m in starts), job.report()
    assert job.hashes() == hashes(2, *short), job.report()


@pytest.mark.parametrize("fault", ["0:15:backward:term", "1:15:mid:kill", "0:15:update:kill", "1:15:after:kill"])
def test_parameters_that_are_split_over_the_ranks(tmp_path: Path, hashes: Hashes, fault: str) -> None:
    """FSDP2: a killed rank's part is in its snapshot."""
    rank, step, place, sort = fault.split(":")
    if sort == "term":
        with start_job(JOB, tmp_path, "--fsdp", "--fault", fault, ranks=2) as job:
            job.wait()
        with start_job(JOB, tmp_path, "--fsdp", ranks=2) as again:
            again.expect(0)
        assert len(again.matches(r"READY \d \d+ 1[56]$")) == 2, again.report()
    else:
        job = again = under_agent(tmp_path, 2, "--fsdp", "--fault", fault, options=["--snapshot-every", 1])
        starts = job.matches(r"READY \d \d+ (\w+)$")[2:]
        assert len(starts) == 2 and all(m[1] in ("13", "14", "15") for m in starts), job.report()
    assert job.matches(f"FAULT {rank} {step} {place}"), job.report()
    assert again.hashes() == hashes(2, "--fsdp"), again.report()


@pytest.mark.parametrize("place", ["mid", "update", "after"])
def test_a_killed_rank_beside_snapshots(tmp_path: Path, hashes: Hashes, place: str) -> None:
    """The copier waits for a boundary that the device never comes to; the dying save does not wait for the copier."""
    options = ("--megabytes", 64, "--size", 48, "--epochs", 2)
    job = under_agent(tmp_path, 2, *options, "--fault", f"1:8:{place}:kill", options=["--snapshot-every", 1])
    assert job.matches(f"FAULT 1 8 {place}"), job.report()
    assert job.matches(r"rank 0.*saved"), job.report()
    starts = job.matches(r"READY \d \d+ (\w+)$")[2:]
    assert len(starts) == 2 and all(m[1] in ("5", "6", "7", "8") for m in starts), job.report()
    assert job.hashes() == hashes(2, *options), job.report()


def test_one_of_three_is_killed(tmp_path: Path, hashes: Hashes) -> None:
    job = under_agent(tmp_path, 3, "--fault", "1:12:mid:kill", options=["--snapshot-every", 0])
    assert job.matches("FAULT 1 12 mid"), job.report()
    assert not job.matches(r"READY \d \d+ None$")[3:], job.report()
    assert job.hashes() == hashes(3), job.report()


def test_rank_0_takes_its_buffers_along_which_is_told(tmp_path: Path) -> None:
    """DDP would have broadcast them."""
    job = under_agent(tmp_path, 2, "--fault", "0:15:mid:kill", options=["--snapshot-every", 0])
    assert job.matches("FAULT 0 15 mid"), job.report()
    assert job.matches("its buffers on a device with it .* not bit for bit"), job.report()
    assert not job.matches(r"READY \d \d+ None$")[2:], job.report()


def test_snapshots_keep_the_buffers(tmp_path: Path, hashes: Hashes) -> None:
    job = under_agent(tmp_path, 2, "--fault", "0:15:mid:kill", options=["--snapshot-every", 1])
    assert job.matches("FAULT 0 15 mid"), job.report()
    assert job.hashes() == hashes(2) and not job.matches("not bit for bit"), job.report()


def test_a_stopped_rank_is_found_and_replaced(tmp_path: Path, hashes: Hashes) -> None:
    options = ["--snapshot-every", 0, "--hang-timeout", 8]
    job = under_agent(tmp_path, 2, "--fault", "1:15:mid:stop", options=options)
    assert job.matches("FAULT 1 15 mid"), job.report()
    assert not job.matches(r"READY \d \d+ None$")[2:], job.report()
    assert job.hashes() == hashes(2), job.report()


# --- in place, over NCCL ---


@pytest.mark.parametrize(("victim", "place"), [*((1, place) for place in PLACES), (0, "mid"), (0, "update")])
def test_the_survivor_keeps_its_process(tmp_path: Path, hashes: Hashes, victim: int, place: str) -> None:
    options = ["--recover", "in-place", "--rejoin-timeout", 60]
    job = under_agent(tmp_path, 2, "--fault", f"{victim}:15:{place}:kill", options=options, MINDX_REJOIN_NCCL="1")
    assert job.matches(f"FAULT {victim} 15 {place}"), job.report()
    assert job.matches(f"recovery 1 in place: rank {victim} replaced"), job.report()
    assert len({m[1] for m in job.matches(rf"READY {1 - victim} (\d+)")}) == 1, job.report()
    if victim == 0:  # whose buffers DDP broadcasts
        assert job.matches("its buffers on a device with it .* not bit for bit"), job.report()
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
