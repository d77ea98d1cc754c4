"""The block writer by itself; `test_writer` covers file systems, short writes and full disks."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mindx_elastic.persist import direct_io
from mindx_elastic.persist.direct_io import ALIGNMENT, BlockWriter, Reserve, preallocate
from tests.harness import unshared_mappings


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def test_error_of_the_writing_thread_reaches_the_caller(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "BLOCK_BYTES", ALIGNMENT)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    blocks = BlockWriter(fd, 0)
    data = torch.zeros(100 * ALIGNMENT, dtype=torch.uint8)  # more than the ring holds: the caller must not hang
    with pytest.raises(OSError, match="Input/output error"):
        blocks.put(data)
    with pytest.raises(OSError, match="Input/output error"):
        blocks.finish()
    blocks.close()


def test_preallocate_of_more_than_the_disk_has_and_without_the_system_call(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=r"No space left|File too large"):
        preallocate(fd, 1 << 60)
    monkeypatch.setattr(direct_io, "_libc", object())
    assert not preallocate(fd, 1 << 20)


def test_a_closed_reserve_holds_no_memory() -> None:
    """An ended guard may live on in a variable of the program, and its reserve with it."""

    def mapped() -> set[str]:
        """The anonymous shared mappings by their inode: other tests leave some to the collector, at any time."""
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return {line.split()[4] for line in lines if line.endswith("/dev/zero (deleted)")}

    before = mapped()
    reserve = Reserve(0, 0)
    blocks = reserve.take()  # waits until its pages are there
    own = mapped() - before
    assert blocks is not None and own
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8")
    start = mappings.index(f"\n{blocks.data_ptr():x}-")
    assert int(mappings[start:].partition("\nRss:")[2].split()[0]) <= 2048, "KiB: the file of a small state has no more"
    reserve.give_back()
    del blocks
    reserve.close()
    assert not mapped() & own and reserve.take() is None


def test_the_room_grows_with_the_state_and_goes_back_to_the_system_whatever_was_forked() -> None:
    """A loader's worker gets none of its pages: those that two processes have stay when one of them lets go."""
    before = unshared_mappings()
    reserve = Reserve(0, 0)
    reserve.make_room(0)
    assert reserve.take() is not None  # waits until its pages are there
    reserve.give_back()
    (first,) = unshared_mappings().keys() - before.keys()
    reserve.make_room(10_000)
    own = {place: kib for place, kib in unshared_mappings().items() if place not in before}
    assert sum(own.values()) >= 10_000 * 2, own
    reserve.release()
    assert not {first, *own} & unshared_mappings().keys()
    reserve.close()


def test_a_forked_child_that_lets_go_of_the_room_keeps_its_own_memory() -> None:
    reserve = Reserve(0, 0)
    assert reserve.take() is not None
    reserve.give_back()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        own = [mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(16)]
        reserve.release()
        os._exit(sum(memory[0] for memory in own))
    _, status = os.waitpid(child, 0)
    reserve.close()
    assert status == 0
