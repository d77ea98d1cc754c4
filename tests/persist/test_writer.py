"""Saving: what ends up on the disk, and what is left of the old when it fails or is killed."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindx_elastic.errors import SaveError, UnsupportedStateError
from mindx_elastic.persist import direct_io
from mindx_elastic.persist.format import CheckpointInfo, read_header
from mindx_elastic.persist.reader import read_checkpoint, verify_file
from mindx_elastic.persist.storage import prepare_owned_directory
from mindx_elastic.persist.writer import previous_path, write_checkpoint
from tests.checkpoint_files import info_of
from tests.harness import no_descriptor_left
from tests.persist.states import assert_same
from tests.persist.test_killed_saves import before_call

INFO = info_of(world_size=2, rank=1, kind="breakpoint", created=1.0, torch_version="")
STATE = {"w": torch.arange(3000.0), "n": 3}


def at_step(step: int, **fields: Any) -> CheckpointInfo:
    return dataclasses.replace(INFO, step=step, **fields)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def big_state() -> dict[str, Any]:
    """13 MiB in more than three blocks, of which none ends where a tensor does."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3_000_001, 7, 0, 1, 123_457, 250_000]
    return {str(size): torch.rand(size, generator=generator) for size in sizes}


# ------------------------------------------------------------------------------------------------ good saves
@given(st.lists(st.integers(0, 20_000), max_size=8), st.integers(1, 4), st.sampled_from([1, 4096, 5000]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_tensors_of_any_size_against_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_blocks: int, piece: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "sizes.safetensors"
    state = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "BLOCK_BYTES", 4096)
        patch.setattr(direct_io, "NUM_BLOCKS", num_blocks)
        patch.setattr(direct_io, "_PIECE_BYTES", piece)
        write_checkpoint(path, state, INFO)
    assert_same(read_checkpoint(path).state, state)


def test_a_save_of_the_same_step_replaces_the_file_and_says_how_large_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, STATE, INFO)
    with no_descriptor_left():
        result = write_checkpoint(path, STATE, INFO)
    assert (result.path, result.nbytes) == (path, path.stat().st_size)
    assert result.duration_s > 0
    assert result.info == dataclasses.replace(INFO, torch_version=torch.__version__) == read_header(path).info
    assert names(tmp_path) == {"x.safetensors"}
    assert path.stat().st_mode & 0o022 == 0


def test_further_names_are_links_or_copies_where_links_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    (tmp_path / "other").mkdir()
    path, also = tmp_path / "x.safetensors", tmp_path / "other" / "y.safetensors"
    write_checkpoint(path, STATE, at_step(1), also=[also, path, also])
    assert path.samefile(also)
    assert names(tmp_path) == {"x.safetensors", "other/y.safetensors"}
    monkeypatch.setattr(os, "link", refuse)
    write_checkpoint(path, STATE, at_step(2), also=[also])
    assert not path.samefile(also)
    for found, step in ((path, 2), (also, 2), (previous_path(path), 1), (previous_path(also), 1)):
        assert verify_file(found) == []
        assert read_header(found).info.step == step
    assert len(names(tmp_path)) == 4


# ------------------------------------------------------------------------------------------------ file systems


def test_direct_io_refused_by_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, refused = os.pwrite, []

    def refuse_direct(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_direct)
    write_checkpoint(tmp_path / "x", big_state(), INFO)
    assert len(refused) <= 1  # none at all where the disk under the test does not know direct I/O
    assert_same(read_checkpoint(tmp_path / "x").state, big_state())


@pytest.mark.parametrize("most", [511, 4096])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    pwrite = os.pwrite

    def short(fd: int, data: memoryview, offset: int) -> int:
        if len(data) > most and most % 4096:  # direct I/O itself takes whole blocks only
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return pwrite(fd, data[:most], offset)

    monkeypatch.setattr(os, "pwrite", short)
    state = {"w": torch.rand(100_001)}
    write_checkpoint(tmp_path / "x", state, INFO)
    assert_same(read_checkpoint(tmp_path / "x").state, state)


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def start(self: threading.Thread) -> None:
        refused.append(self)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        write_checkpoint(tmp_path / "x", big_state(), INFO)
    assert refused
    assert_same(read_checkpoint(tmp_path / "x").state, big_state())


# ------------------------------------------------------------------------------------------------ older files
@pytest.mark.parametrize("later", [{"run_id": "new"}, {"attempt": 1}, {"step": 18}])
def test_file_of_another_run_attempt_or_step_is_kept(tmp_path: Path, later: dict[str, Any]) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, STATE, INFO)
    write_checkpoint(path, STATE, dataclasses.replace(INFO, **later))
    found, kept = read_header(path).info, read_header(previous_path(path)).info
    assert (kept.run_id, kept.attempt, kept.step) == (INFO.run_id, INFO.attempt, INFO.step)
    assert (found.run_id, found.attempt, found.step) != (kept.run_id, kept.attempt, kept.step)


@pytest.mark.parametrize("folder", [".", "rank_1"])
def test_damaged_file_goes_to_quarantine_and_pushes_nothing_out(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "x.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_checkpoint(path, STATE, at_step(1))
    write_checkpoint(path, STATE, at_step(2))
    path.write_bytes(b"damaged")
    write_checkpoint(path, STATE, at_step(3))
    assert read_header(path).info.step == 3
    assert read_header(previous_path(path)).info.step == 1
    assert (tmp_path / "quarantine" / folder / "x.safetensors").read_bytes() == b"damaged"
    assert "header" in (tmp_path / "quarantine" / folder / "x.safetensors.reason.txt").read_text()


def test_symbolic_link_is_replaced_and_its_target_is_not_touched(tmp_path: Path) -> None:
    target, path = tmp_path / "precious", tmp_path / "x.safetensors"
    target.write_text("precious")
    path.symlink_to(target)
    write_checkpoint(path, STATE, INFO)
    assert target.read_text() == "precious"
    assert not path.is_symlink()
    assert verify_file(path) == []


def test_a_folder_in_the_place_of_the_file_and_a_value_that_no_file_holds(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(SaveError, match="folder"):
        write_checkpoint(tmp_path / "x", STATE, INFO)
    with pytest.raises(UnsupportedStateError, match=r"model\.w: sparse"):
        write_checkpoint(tmp_path / "y", {"model": {"w": torch.eye(2).to_sparse()}}, INFO)
    assert names(tmp_path) == set()


# ------------------------------------------------------------------------------------------------ failures
@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """A disk that is full after `nbytes` of each file. (Python ignores the signal that comes with it.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A good checkpoint of step 1 that no failed save may touch."""
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, STATE, at_step(1))
    return path


def assert_untouched(old: Path) -> None:
    assert read_checkpoint(old).info.step == 1
    assert names(old.parent) == {old.name}, "temporary files are gone"


@pytest.mark.parametrize("limit", [0, 4096 + 512, 12 << 20])
@pytest.mark.parametrize("reserves", [True, False])
def test_disk_full(old: Path, monkeypatch: pytest.MonkeyPatch, reserves: bool, limit: int) -> None:
    """Found while reserving, or (file systems that cannot reserve) by a write in the other thread."""
    if not reserves:
        monkeypatch.setattr("mindx_elastic.persist.writer.preallocate", lambda _fd, _n: False)
    with file_size_limit(limit), pytest.raises(SaveError, match="rank 1, step 2") as caught:
        write_checkpoint(old, big_state(), at_step(2))
    error = caught.value
    assert (error.path, error.rank, error.step, error.errno) == (old, 1, 2, errno.EFBIG)
    assert isinstance(error.__cause__, OSError)
    assert_untouched(old)


def test_not_enough_free_space_where_it_cannot_be_reserved(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindx_elastic.persist.writer.preallocate", lambda _fd, _n: False)
    monkeypatch.setattr("mindx_elastic.persist.storage.free_space", lambda _path: 1000)
    with pytest.raises(SaveError, match="1,000 free"):
        write_checkpoint(old, big_state(), at_step(2))
    assert_untouched(old)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "bad disk"), OSError(errno.EMFILE, "many files"), KeyboardInterrupt()], ids=repr
)
def test_an_error_of_any_system_call_leaves_a_good_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    failures: list[BaseException] = []
    for number in itertools.count(1):
        path = tmp_path / str(number) / "x.safetensors"
        path.parent.mkdir()
        write_checkpoint(path, STATE, at_step(1))
        fired = []

        def fail() -> None:
            fired.append(error)  # noqa: B023
            raise error

        with monkeypatch.context() as patch:
            before_call(number, fail, patch.setattr)
            try:
                write_checkpoint(path, STATE, at_step(2))
            except (SaveError, KeyboardInterrupt) as caught:
                failures.append(caught)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("mindx-persist")]
        there = {name: read_header(path.parent / name).info.step for name in names(path.parent) if "reason" not in name}
        assert "x.safetensors" in there and 1 in there.values(), there
        assert 2 in there.values() or any(error in (one, one.__cause__) for one in failures[-1:]), there
        if not fired:
            break
    assert there == {"x.safetensors": 2, "x.prev.safetensors": 1} and len(failures) > 5


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOMEM])
def test_an_older_file_that_cannot_be_read_is_put_aside_where_the_process_lacks_nothing(
    old: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its name is needed, its bytes are not. What this process lacks says nothing of the file."""
    content, fired = old.read_bytes(), []

    def fail(path: Path) -> None:
        fired.append(path)
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("mindx_elastic.persist.writer.read_header", fail)
        if code in (errno.EMFILE, errno.ENOMEM):
            with pytest.raises(SaveError):
                write_checkpoint(old, STATE, at_step(2))
        else:
            write_checkpoint(old, STATE, at_step(2))
    assert fired == [old]
    if code in (errno.EMFILE, errno.ENOMEM):
        assert_untouched(old)
    else:
        assert read_checkpoint(old).info.step == 2
        aside = [path for path in (old.parent / "quarantine").iterdir() if not path.name.endswith(".reason.txt")]
        assert [path.read_bytes() for path in aside] == [content]


def test_a_file_that_cannot_be_flushed_does_not_get_its_name(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(SaveError, match="Input/output error"):
            write_checkpoint(old, STATE, at_step(2))
    assert_untouched(old)


def refuse_renames(
    monkeypatch: pytest.MonkeyPatch, code: int, refuses: Callable[[Path], bool], times: int = 1000
) -> list[Path]:
    """Renames to a name that `refuses` fail with `code`, `times` times. Returns those that did."""
    real = os.rename
    refused: list[Path] = []

    def rename(source: Path, target: Path) -> None:
        if refuses(target) and len(refused) < times:
            refused.append(target)
            raise OSError(code, os.strerror(code), str(source), None, str(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    return refused


def test_a_name_that_is_refused_for_a_moment_or_for_good(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has it open on a network share."""
    refuse_renames(monkeypatch, errno.EBUSY, lambda name: name == old, 1)
    write_checkpoint(old, STATE, at_step(2))
    assert read_checkpoint(old).info.step == 2
    refuse_renames(monkeypatch, errno.EBUSY, lambda name: name == old)
    with pytest.raises(SaveError, match="busy"):
        write_checkpoint(old, STATE, at_step(3))
    assert read_checkpoint(old).info.step == 2


def test_a_file_system_without_renames_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mounted bucket."""
    refuse_renames(monkeypatch, errno.EXDEV, lambda name: True)
    with pytest.raises(SaveError, match=r"no file can be renamed there .*; give a directory on a disk"):
        prepare_owned_directory(tmp_path)
    assert not list(tmp_path.iterdir())


def test_failing_further_name_does_not_cost_the_file(old: Path) -> None:
    also = old.parent / "none" / "y.safetensors"
    with pytest.raises(
        SaveError, match=r"y\.safetensors: .*No such file.*the same state is durable in .*x\.safe"
    ) as caught:
        write_checkpoint(old, STATE, at_step(2), also=[also])
    assert caught.value.path == also
    assert read_checkpoint(old).info.step == 2
