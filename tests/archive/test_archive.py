"""An archive on a file system that fails: what is told, what counts, what is deleted."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mindx_elastic.archive.archive import Archive
from mindx_elastic.archive.names import ArchivedName
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import CheckpointError, UsageError
from mindx_elastic.persist.format import read_header
from mindx_elastic.start.findings import Findings, add_archived, list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory
from tests.checkpoint_files import write, write_step

LOST = ConnectionError("the network is gone")


class Faulty(MemoryFileSystem):  # type: ignore[misc]
    """Does what `fault` says in the place of an upload."""

    protocol = ("faulty",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    fault: Callable[[Callable[[], None], str], None] | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("faulty://", "memory://")))

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **more: Any) -> None:
        def put() -> None:
            super(Faulty, self).put_file(lpath, rpath, **more)

        if Faulty.fault is None:
            put()
        else:
            Faulty.fault(put, rpath)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr("mindx_elastic.archive.archive._PAUSES_S", (0.0, 0.0))
    yield
    Faulty.fault = None
    Faulty.store.clear()


@pytest.fixture
def url() -> str:
    return f"faulty://{uuid.uuid4().hex}"


@pytest.fixture
def opened(tmp_path: Path, url: str) -> Iterator[Callable[..., Archive]]:
    made = []

    def open_archive(rank: int = 0, size: int = 1, writers: int = 5, root: Path = tmp_path) -> Archive:
        archive = Archive(url, RankInfo(rank=rank, world_size=size), [root])
        archive.part.writers = writers
        made.append(archive)
        return archive

    yield open_archive
    for archive in made:
        archive.close()


def upload(archive: Archive, path: Path, step: int) -> None:
    task = archive.submit(path, step)
    assert task is not None
    task.wait(60)


def steps(archive: Archive) -> list[int]:
    return sorted(entry.info.step for _, entry in archive.look() if entry.info is not None)


def test_a_name_says_what_it_was_made_of() -> None:
    name = ArchivedName("run/é .", 1, 20, 255, 3, 4, 0, "a" * 32, "rank_3/my=net-1_20.safetensors")
    assert ArchivedName.parse(name.path) == name
    assert ArchivedName.parse(name.path.replace("rank_3", "..")) is None
    assert ArchivedName.parse(f"{name.path}.header") is None


def test_a_trouble_is_told_once_until_it_is_over(
    tmp_path: Path, opened: Callable[..., Archive], caplog: pytest.LogCaptureFixture
) -> None:
    archive = opened()
    tries = 0

    def gone(put: Callable[[], None], path: str) -> None:
        nonlocal tries
        tries += 1
        raise LOST

    Faulty.fault = gone
    for step in (1, 2):
        upload(archive, write(tmp_path / f"a-1_{step}.safetensors", step=step), step)
    assert tries == 6, "each is tried three times"
    told = [record.message for record in caplog.records if "the network is gone" in record.message]
    assert len(told) == 1 and "step 1 is not there" in told[0] and "credentials" in told[0] and len(told[0]) <= 320
    Faulty.fault = None
    upload(archive, write(tmp_path / "a-1_3.safetensors", step=3), 3)
    assert steps(archive) == [3]
    Faulty.fault = gone
    upload(archive, write(tmp_path / "a-1_4.safetensors", step=4), 4)
    assert sum("the network is gone" in record.message for record in caplog.records) == 2
    archive.finish(None)
    assert "step 4 of rank 0 is not in" in caplog.records[-1].message
    assert "could not be uploaded" in caplog.records[-1].message


def test_a_file_that_is_deleted_while_its_upload_fails_is_not_told_as_a_slow_upload(
    tmp_path: Path, opened: Callable[..., Archive], caplog: pytest.LogCaptureFixture
) -> None:
    """And deletions that work meanwhile do not end the trouble."""
    archive = opened()
    for step in (1, 2, 3):
        path = write(tmp_path / f"a-1_{step}.safetensors", step=step)

        def gone(put: Callable[[], None], name: str, path: Path = path) -> None:
            path.unlink(missing_ok=True)
            raise LOST

        Faulty.fault = gone
        header = read_header(path)
        assert header.info is not None
        upload(archive, path, step)
        archive.drop(header.info.moment, header.digest)
        upload(archive, tmp_path / "a-1_0.safetensors", 0)  # which waited meanwhile, and is not there any more
    archive.finish(None)
    assert "longer than the time between two saves" not in caplog.text
    assert caplog.text.count("the network is gone") == 1


def test_credentials_that_have_ended_are_not_tried_again(
    tmp_path: Path, opened: Callable[..., Archive], caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def refuse(put: Callable[[], None], path: str) -> None:
        tries.append(path)
        raise PermissionError("ExpiredToken")

    Faulty.fault = refuse
    upload(opened(), write(tmp_path / "a-1_1.safetensors", step=1), 1)
    assert len(tries) == 1 and "PermissionError: ExpiredToken" in caplog.text


def test_half_an_upload_does_not_count(tmp_path: Path, opened: Callable[..., Archive]) -> None:
    """Neither where the library says nothing, nor where the process dies."""
    archive = opened()
    torn = []

    def tear(put: Callable[[], None], path: str) -> None:
        put()
        file = Faulty.store[Faulty._strip_protocol(path)]
        file.truncate(len(file.getvalue()) // 2)
        torn.append(path)
        if len(torn) > 3:
            Faulty.fault = None

    Faulty.fault = tear
    path = write(tmp_path / "a-1_1.safetensors", step=1)
    upload(archive, path, 1)
    assert len(torn) == 3 and steps(archive) == []
    upload(archive, path, 1)
    assert len(torn) == 4 and steps(archive) == [1], "the next try replaces what does not count"


def test_a_torn_marker_does_not_count(
    tmp_path: Path, opened: Callable[..., Archive], caplog: pytest.LogCaptureFixture
) -> None:
    archive = opened()
    upload(archive, write(tmp_path / "a-1_1.safetensors", step=1), 1)
    (marker,) = (path for path in Faulty.store if path.endswith(".header"))
    Faulty.store[marker].truncate(3000)
    assert steps(archive) == [] and "its header is damaged" in caplog.text


def test_an_object_that_was_exchanged_is_not_taken(tmp_path: Path, opened: Callable[..., Archive]) -> None:
    archive = opened()
    upload(archive, write(tmp_path / "a-1_1.safetensors", step=1), 1)
    ((address, entry),) = archive.look()
    entry.path.unlink()
    other = write(tmp_path / "other" / "a.safetensors", step=2)
    (place,) = (path for path in Faulty.store if path.endswith(".safetensors"))
    Faulty.store[place].seek(0)
    Faulty.store[place].write(other.read_bytes())
    Faulty.store[place].truncate(other.stat().st_size)
    with pytest.raises(CheckpointError, match="has another content than its name says"):
        archive.fetch(address, entry.path)
    assert not entry.path.exists()


def test_what_is_there_is_not_uploaded_or_fetched_again(tmp_path: Path, opened: Callable[..., Archive]) -> None:
    first, second = opened(), opened(writers=6)
    path = write(tmp_path / "a-1_1.safetensors", step=1)
    upload(first, path, 1)
    before = dict(Faulty.store)
    upload(second, path, 1)
    assert Faulty.store == before
    ((address, entry),) = second.look()
    assert second.fetch(address, entry.path) is False
    bytes_before = path.read_bytes()
    path.unlink()
    assert second.fetch(address, entry.path) is True
    assert path.read_bytes() == bytes_before and read_header(path).info.step == 1


def inventory(archive: Archive, root: Path) -> Inventory:
    found = scan(list_files([root]), trust=reader_trust(root))
    add_archived(found, archive, counts=True)
    return Inventory.merge([Findings.decode(found.encode(), found.strategies)])


def test_files_of_two_jobs_are_never_put_together(tmp_path: Path, opened: Callable[..., Archive]) -> None:
    """A zombie and its successor have both gone on from one step: each has uploaded one rank's file of the next."""
    for writers, rank in ((5, 0), (6, 1)):
        root = tmp_path / f"job {writers}"
        write_step(root, 20, coordinates={"writers": writers, "replicas": 2})
        upload(opened(rank, 2, writers, root), root / f"rank_{rank}" / "resnet-1_20.safetensors", 20)
    new = tmp_path / "new"
    new.mkdir()
    found = inventory(opened(root=new), new)
    assert len(found.facts) == 1
    assert any("another job" in each.reason for each in found.rejected)
    upload(opened(1, 2, 5, tmp_path / "job 5"), tmp_path / "job 5" / "rank_1" / "resnet-1_20.safetensors", 20)
    found = inventory(opened(root=new), new)
    assert {(fact.rank, fact.writers) for fact in found.facts} == {(0, 5), (1, 5)}, "the one of more ranks"


def test_what_is_on_disk_goes_first(tmp_path: Path, opened: Callable[..., Archive]) -> None:
    upload(opened(), write(tmp_path / "a-1_1.safetensors", step=1), 1)
    facts = inventory(opened(), tmp_path).facts
    assert [bool(fact.address) for fact in facts] == [False, True]


def test_the_last_step_of_all_ranks_is_never_deleted(tmp_path: Path, opened: Callable[..., Archive]) -> None:
    ranks = [opened(rank, 2) for rank in range(2)]
    for step in (1, 2):
        write_step(tmp_path, step)
    paths = {(r, s): tmp_path / f"rank_{r}" / f"resnet-1_{s}.safetensors" for r in range(2) for s in (1, 2)}
    old = read_header(paths[0, 1])
    upload(ranks[0], paths[0, 1], 1)
    upload(ranks[1], paths[1, 1], 1)
    ranks[0].drop(old.info.moment, old.digest)
    upload(ranks[0], paths[0, 2], 2)
    reader = opened()
    assert steps(reader) == [1, 1, 2], "of step 2 one rank is missing"
    upload(ranks[1], paths[1, 2], 2)
    ranks[0].drop(old.info.moment, old.digest)
    upload(ranks[0], paths[0, 2], 2)
    assert steps(reader) == [1, 2, 2]


def test_an_upload_that_stalls_gives_way_to_the_last_file(tmp_path: Path, opened: Callable[..., Archive]) -> None:
    archive = opened()
    begun, free = threading.Event(), threading.Event()
    put_for = []

    def stall(put: Callable[[], None], path: str) -> None:
        put_for.append(path)
        begun.set()
        free.wait()
        put()

    Faulty.fault = stall
    for step in (1, 2):
        archive.submit(write(tmp_path / f"a-1_{step}.safetensors", step=step), step)
    begun.wait()
    last = write(tmp_path / "a-1_3.safetensors", step=3)
    archive.deliver(last, 3, 0.0)  # returns at once
    free.set()
    archive.finish(30.0)
    assert 3 in steps(archive) and 2 not in steps(archive)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/folder", "give a URL"),
        ("nosuch://bucket", "pip install"),
        ("s3://key:secret@bucket/x", "leave the password out"),
    ],
)
def test_what_cannot_be_an_archive_is_refused(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        Archive(url, RankInfo(), [tmp_path])
    assert "secret" not in str(caught.value) and len(str(caught.value)) <= 320


def test_all_ranks_have_one_archive(tmp_path: Path) -> None:
    part = Archive("memory://x", RankInfo(), [tmp_path]).part
    with pytest.raises(UsageError, match="rank 1: give the same to every rank"):
        part.merge(["memory://x", "memory://y"])


def test_a_file_that_another_rank_deletes_while_a_start_looks_is_not_there(
    tmp_path: Path, opened: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is about to end still deletes what its disk has no more."""
    archive = opened()
    for step in (1, 2):
        upload(archive, write(tmp_path / f"a-1_{step}.safetensors", step=step), step)
    finished = archive._finished

    def list_and_lose(folder: str, **more: Any) -> list[ArchivedName]:
        names = finished(folder, **more)
        (marker,) = [path for path in Faulty.store if "/0-1/" in path and path.endswith(".header")]
        del Faulty.store[marker]
        return names

    monkeypatch.setattr(archive, "_finished", list_and_lose)
    assert steps(archive) == [2]


def test_files_of_several_runs_are_told(
    tmp_path: Path, opened: Callable[..., Archive], caplog: pytest.LogCaptureFixture
) -> None:
    archive = opened()
    for number, run in enumerate(("one", "one", "other"), 1):
        upload(archive, write(tmp_path / f"{run}-1_{number}.safetensors", step=number, run_id=run), number)
    assert steps(archive) == [1, 2, 3]
    (told,) = (record.message for record in caplog.records if "runs" in record.message)
    assert "files of 2 runs (one, other)" in told


def test_ranks_whose_uploads_are_slower_than_the_saves_leave_out_the_same_steps(
    tmp_path: Path, opened: Callable[..., Archive], caplog: pytest.LogCaptureFixture
) -> None:
    """An upload of rank 0 takes three saves, one of rank 1 seven; two files are kept on disk."""
    takes = {0: 3.0, 1: 7.0}
    archives = {rank: opened(rank, 2) for rank in takes}
    tasks = []
    ends = dict.fromkeys(takes, 0.0)  # of the upload under way, counted in saves
    now, changed = 0.0, threading.Condition()

    def slow(put: Callable[[], None], path: str) -> None:
        rank = int(path.rpartition("-of-")[0].rpartition("/")[2])
        with changed:
            ends[rank] = max(now, ends[rank]) + takes[rank]
            assert changed.wait_for(lambda: now >= ends[rank], 60)
        put()

    def save(step: int) -> None:
        for rank, archive in archives.items():
            folder = tmp_path / f"rank_{rank}"
            path = write(folder / f"a-1_{step}.safetensors", rank=rank, world_size=2, step=step)
            tasks.append((rank, archive.submit(path, step)))
            (folder / f"a-1_{step - 2}.safetensors").unlink(missing_ok=True)

    def settle() -> None:
        """All that can go on until now has done so."""
        for rank, task in tasks:
            while task is not None and not task.done.wait(0.005) and ends[rank] <= now:
                pass

    Faulty.fault = slow
    last = 80
    for step in range(1, last + 1):
        save(step)
        settle()
        with changed:
            now = float(step)
            changed.notify_all()
        settle()
    with changed:
        now = math.inf
        changed.notify_all()
    for archive in archives.values():
        archive.finish(None)
    found = [entry.info for archive in archives.values() for _, entry in archive.look() if entry.info is not None]
    of_each = [{info.step for info in found if info.rank == rank} for rank in takes]
    assert last in of_each[0] & of_each[1]
    assert len(of_each[1]) >= 8 and len(of_each[1] - of_each[0]) <= 3, of_each
    assert caplog.text.count("Steps are left out") == 2
