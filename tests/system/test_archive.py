"""Jobs with an archive, whose machine is lost, or whose archive fails: real processes and signals."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint_files import flip_bit_in_data
from tests.harness import events, run_command, run_job, start_job, wait_until
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow


def whole(archive: Path, step: int | str = "*") -> list[Path]:
    """The files of a step that were uploaded to their end."""
    return [path.with_suffix("") for path in archive.glob(f"*/*-{step}/*/*/*/*.header")]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def env(archive: Path) -> dict[str, str]:
    return {"MINDX_ARCHIVE": f"file://{archive}", "MINDX_ARENA_DIR": "none"}


def stopped(folder: Path, ranks: int, env: dict[str, str], *args: object) -> int:
    """The step at which a job was stopped."""
    with start_job("loop.py", folder, "--hold-at", 7, *args, ranks=ranks, env=env) as job:
        job.wait_for("HOLD", ranks)
        job.signal_launcher(signal.SIGTERM)
        job.wait()
        return int(job.matches(r"step (\d+) saved in")[0][1])


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "then"), [(2, 1), (2, 2), (1, 1)])
def test_a_stopped_job_goes_on_where_nothing_is(
    tmp_path: Path, archive: Path, env: dict[str, str], ranks: int, then: int, uninterrupted: Uninterrupted
) -> None:
    """Also with fewer ranks."""
    first = tmp_path / "first" / "ckpt"
    step = stopped(first, ranks, env)
    assert [event["outcome"] for event in events(first, "archive")] == ["uploaded"] * ranks
    assert len(whole(archive, step)) == ranks
    shutil.rmtree(first)  # the machine is lost

    second = tmp_path / "second" / "ckpt"
    plan = run_command("plan", second, "--archive", env["MINDX_ARCHIVE"])
    assert f"step {step}" in plan and f"{ranks} of these files have to be fetched" in plan
    job = run_job("loop.py", second, ranks=then, env=env)
    assert set(job.resumed()) == {str(step)}
    assert len(job.matches("has fetched .* from the archive")) == then, job.report()
    if then == ranks:
        assert job.hashes() == uninterrupted("loop.py", ranks).hashes()


def kill_between_saves(folder: Path, ranks: int, env: dict[str, str], archive: Path) -> None:
    """With steps 6 and 9 in the archive."""
    args = ("--save-every", 3, "--hold-at", 10)
    with start_job("loop.py", folder, *args, ranks=ranks, env=env) as job:
        job.wait_for("HOLD", ranks)
        wait_until(lambda: len(whole(archive, 9)) == ranks, "step 9 of all ranks in the archive")
        for rank in range(ranks):
            job.signal_rank(rank, signal.SIGKILL)


def test_a_killed_job_goes_on_from_a_save_on_the_way(
    tmp_path: Path, archive: Path, env: dict[str, str], uninterrupted: Uninterrupted
) -> None:
    first = tmp_path / "first"
    kill_between_saves(first, 2, env, archive)
    shutil.rmtree(first)
    job = run_job("loop.py", tmp_path / "second", "--save-every", 3, ranks=2, env=env)
    assert set(job.resumed()) == {"9"}, job.report()
    assert job.hashes() == uninterrupted("loop.py", 2).hashes()
    steps = {path.parts[-5].partition("-")[2] for path in whole(archive)}
    assert len(steps) < 9, "old steps are deleted in the archive, too"


def test_of_a_damaged_object_nothing_is_loaded(
    tmp_path: Path, archive: Path, env: dict[str, str], uninterrupted: Uninterrupted
) -> None:
    first = tmp_path / "first"
    kill_between_saves(first, 1, env, archive)
    shutil.rmtree(first)
    (damaged,) = whole(archive, 9)
    flip_bit_in_data(damaged)
    job = run_job("loop.py", tmp_path / "second", env=env)
    assert job.resumed() == ["6"], job.report()
    assert job.matches("is damaged and now in .*quarantine"), job.report()
    assert job.hashes() == uninterrupted("loop.py", 1).hashes()


def test_a_start_that_cannot_read_the_archive_never_begins_afresh(tmp_path: Path) -> None:
    """Where the disk has a step it goes on from that, and leaves the archive alone."""
    env = {"MINDX_ARENA_DIR": "none", "STALL_AT": "0", "MINDX_ARCHIVE": "broken:///x"}
    step = stopped(tmp_path / "ckpt", 1, {"MINDX_ARENA_DIR": "none"})
    job = run_job("archived.py", tmp_path / "ckpt", env=env)
    assert job.resumed() == [str(step)]
    assert job.matches("archive broken:///x cannot be read .*this attempt uploads nothing"), job.report()
    job = run_job("archived.py", tmp_path / "new", env=env, code=1)
    assert job.matches("NoUsableCheckpointError: the archive broken:///x cannot be read .*leave the archive out")


@pytest.mark.few(1)
@pytest.mark.parametrize("dies", [False, True], ids=["stopped in time", "killed"])
def test_a_stalled_upload_holds_nobody_and_does_not_count(
    tmp_path: Path, archive: Path, dies: bool, uninterrupted: Uninterrupted
) -> None:
    first = tmp_path / "first"
    env = {"MINDX_ARCHIVE": f"stall://{archive}", "MINDX_ARENA_DIR": "none", "STALL_AT": "8"}
    args = ("--save-every", 3, "--hold-at", 7, "--grace-s", 6)
    with start_job("archived.py", first, *args, env=env) as job:
        job.wait_for("HOLD")
        job.signal_launcher(signal.SIGTERM)
        job.wait_for("STALLED")
        if dies:
            job.signal_launcher(signal.SIGKILL)
        code = job.wait()
    assert code == (-signal.SIGKILL if dies else 143), job.report()
    if not dies:
        assert job.matches(r"step 8 of rank 0 is not in stall://.*: the time was up"), job.report()
    whole_env = {"MINDX_ARCHIVE": f"file://{archive}", "MINDX_ARENA_DIR": "none"}
    assert not whole(archive, 8) and whole(archive, 6)
    elsewhere = run_job("loop.py", tmp_path / "second", env=whole_env)
    assert elsewhere.resumed() == ["6"], elsewhere.report()
    assert elsewhere.hashes() == uninterrupted("loop.py", 1).hashes()
    shutil.rmtree(archive)
    here = run_job("loop.py", first, "--hold-at", -1, env=whole_env)
    assert here.resumed() == ["8"]
    assert whole(archive, 8), "the next start on the machine uploads it"
    assert here.hashes() == elsewhere.hashes()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a real S3 server with a bucket."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    env = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("boto3").client("s3").create_bucket(Bucket="bucket")
    yield {**env, "MINDX_ARCHIVE": f"s3://bucket/{tmp_path.name}", "MINDX_ARENA_DIR": "none"}
    server.stop()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_real_s3_server(tmp_path: Path, s3: dict[str, str], ranks: int, uninterrupted: Uninterrupted) -> None:
    step = stopped(tmp_path / "first", ranks, s3)
    shutil.rmtree(tmp_path / "first")
    job = run_job("loop.py", tmp_path / "second", "--save-every", 5, ranks=ranks, env=s3)
    assert set(job.resumed()) == {str(step)}, job.report()
    assert job.hashes() == uninterrupted("loop.py", ranks).hashes()
    last = run_job("loop.py", tmp_path / "third", ranks=ranks, env=s3)
    assert last.hashes() == job.hashes()
