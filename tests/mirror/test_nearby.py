"""Snapshots in another node's memory: one rank with an arena, and the server of another with a memory of its own."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.owners import Trust
from mindx_elastic.memory.arena import COPY_FILE, RankArena, SlotState, read_records
from mindx_elastic.memory.folders import job_folder
from mindx_elastic.memory.snapshots import copy_snapshot, lay_out, seal_slot
from mindx_elastic.mirror.mirror import Mirror
from mindx_elastic.mirror.nearby import Nearby
from mindx_elastic.mirror.server import Server
from mindx_elastic.mirror.wire import Channel, Endpoint, ask
from mindx_elastic.persist.reader import read_checkpoint, verify_file
from mindx_elastic.start.findings import list_files, scan
from tests.checkpoint_files import STATE, info_of
from tests.harness import wait_until
from tests.persist.states import assert_same

SOURCE, PARTNER, WORLD = 1, 0, 3


class Pair:
    """Rank 1 sends, rank 0 keeps."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.disk = folder / "job"
        self.disk.mkdir()
        self.memories = [folder / "shm0", folder / "shm1"]
        for memory in self.memories:
            memory.mkdir()
        self.arena = RankArena(self.memories[1], self.disk, SOURCE)
        stack.callback(self.arena.close)
        self.partner = partner = RankArena(self.memories[0], self.disk, PARTNER)
        stack.callback(partner.close)
        ranks = RankInfo(rank=PARTNER, world_size=WORLD)
        self.server = Server(ranks, [self.disk], [SOURCE], "127.0.0.1", patience_s=5.0, arena=partner)
        stack.callback(self.server.close)
        self.failed: list[str] = []
        self.in_transfer: Callable[[], object] = lambda: None
        self.nearby = Nearby(self.arena, [PARTNER], self._request, self._fail)
        stack.callback(self.nearby.close)
        self._sequence = 0

    def _fail(self, partner: int, error: Exception, what: str) -> None:
        self.failed.append(str(error))

    @contextmanager
    def _request(self, partner: int, size: int, header: bytes) -> Iterator[Channel]:
        digest = xxhash.xxh3_128_hexdigest(header)
        with self.ask("keep", size=size, head=len(header), header=digest) as channel:
            self.in_transfer()
            yield channel

    def ask(self, op: str, **fields: Any) -> AbstractContextManager[Channel]:
        return ask(self.server.endpoint, SOURCE, op, **fields)

    def snapshot(self, step: int, *, sealed: bool = False, **fields: Any) -> None:
        self._sequence += 1
        info = info_of(rank=SOURCE, world_size=WORLD, step=step, **fields)
        index = copy_snapshot(self.arena, lay_out(STATE, info, None), self._sequence, at=lambda stage: None)
        assert index is not None and (not sealed or seal_slot(self.arena, index))

    def copy(self) -> None:
        self.nearby.copy_newest()
        wait_until(lambda: not self.nearby._thread.busy, "the copy", 60)

    @property
    def kept(self) -> Path:
        return job_folder(self.memories[0], self.disk) / f"rank_{SOURCE}"

    @property
    def steps(self) -> list[int]:
        """Those that the partner's records say are whole."""
        return sorted(record.step for record in read_records(self.kept) if record.state is SlotState.SEALED)

    @property
    def found(self) -> list[int]:
        """Those that a start finds there."""
        listing = list_files([self.disk], self.kept.parent)
        return sorted(fact.moment[2] for fact in scan(listing, trust=Trust()).in_memory)

    def path_of(self, step: int) -> Path:
        (index,) = [n for n, record in enumerate(read_records(self.kept)) if record.step == step]
        return self.kept / f"slot_{index}.safetensors"

    def stream(self, step: int) -> tuple[bytes, int]:
        """What a source sends of its newest snapshot, without the digest, and the bytes of its header."""
        self.snapshot(step, sealed=True)
        record = self.arena.newest()
        (path,) = [slot.path for n, slot in enumerate(self.arena.slots) if self.arena.record(n) == record]
        return path.read_bytes(), record.header_bytes


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[None]:
    """By another process, as by the rank that owns the folder."""
    code = "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.lockf(f,fcntl.LOCK_EX); print('held',flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.kill()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, tmp_path)


@pytest.mark.parametrize("sealed", [True, False])
def test_the_two_newest_snapshots_are_kept_and_verified(pair: Pair, sealed: bool) -> None:
    for step in (5, 6, 7):
        pair.snapshot(step, sealed=sealed)
        pair.copy()
    assert (pair.steps, pair.found, pair.failed) == ([6, 7], [6, 7], [])
    assert (pair.kept / COPY_FILE).exists()
    assert_same(read_checkpoint(pair.path_of(7)).state, STATE)


def test_a_snapshot_that_is_overtaken_counts_for_nothing(pair: Pair) -> None:
    pair.snapshot(5)
    pair.copy()
    pair.snapshot(6)

    def overtake() -> None:
        pair.in_transfer = lambda: None
        pair.snapshot(7)
        pair.snapshot(8)  # into the slot of 6

    pair.in_transfer = overtake
    pair.copy()
    assert (pair.steps, pair.found, pair.failed) == ([5], [5], [])
    pair.copy()
    assert pair.steps == [5, 8]


def test_of_a_copy_that_is_overtaken_it_is_known_how_long_it_would_have_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, num_sleeps, sleep = info_of(rank=SOURCE, world_size=WORLD, step=5), 0, time.sleep
    large = lay_out({"large": torch.zeros(16 << 20, dtype=torch.uint8)}, info, None)
    assert copy_snapshot(pair.arena, large, 1, at=lambda stage: None) is not None
    pair._sequence = 1

    def send(channel: Channel, data: memoryview | bytes) -> None:
        nonlocal num_sleeps
        if len(data) == 1 << 20:
            num_sleeps += 1
            sleep(0.05)
            if num_sleeps == 4:
                pair.snapshot(6)
                pair.snapshot(7)
        whole(channel, data)

    whole = Channel._send
    monkeypatch.setattr(Channel, "_send", send)
    pair.copy()
    assert (pair.steps, num_sleeps) == ([], 4)
    assert 1.2 < pair.nearby.took_s < 10  # 16 pieces of 0.05 s, in half of the time; the 4 have taken 0.4 s


def test_a_source_that_dies_leaves_the_copy_before(pair: Pair) -> None:
    pair.snapshot(5)
    pair.copy()
    for step in (6, 7):  # the same slot again
        data, head = pair.stream(step)
        with pair.ask("keep", size=len(data), head=head) as channel:
            channel.answer()
            channel._send(data[: len(data) - 1])
        wait_until(lambda: not pair.server._channels, "the end of the connection", 60)
        assert (pair.steps, pair.found) == ([5], [5])
    assert_same(read_checkpoint(pair.path_of(5)).state, STATE)


@pytest.mark.parametrize(("what", "words"), [("flipped", "damaged on its way"), ("rank", "a snapshot of rank 2 of 3")])
def test_what_is_not_the_snapshot_is_refused(pair: Pair, what: str, words: str) -> None:
    pair.snapshot(5)
    pair.copy()
    if what == "rank":
        other = RankArena(pair.memories[1], pair.disk, 2)
        index = copy_snapshot(
            other, lay_out(STATE, info_of(rank=2, world_size=WORLD, step=6), None), 1, at=lambda stage: None
        )
        assert index is not None and seal_slot(other, index)
        path = other.slots[index].path
        other.close()
    else:
        path = pair.memories[1] / "stream"
        path.write_bytes(pair.stream(6)[0])
    size, head = path.stat().st_size, pair.arena.newest().header_bytes
    fd = os.open(path, os.O_RDWR)
    with pair.ask("keep", size=size, head=head) as channel:
        channel.answer()
        if what == "flipped":
            channel._send(path.read_bytes() + bytes(16))
        else:
            channel.send_file(fd, size)
        with pytest.raises(ConnectionError, match=words):
            channel.answer()
    os.close(fd)
    assert (pair.steps, pair.found) == ([5], [5])


def test_no_room_is_told_once_and_the_next_copy_may_have_some(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.snapshot(5)
    with monkeypatch.context() as full:

        def refuse(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "no space")

        for step in (6, 7):
            pair.snapshot(step)
            full.setattr("mindx_elastic.memory.arena.os.posix_fallocate", refuse)
            pair.copy()
            full.undo()
    assert len(pair.failed) == 1 and "no room for" in pair.failed[0]
    pair.snapshot(8)
    pair.copy()
    assert pair.steps == [8]


def test_the_node_s_own_ranks_have_room_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    own = lay_out(STATE, info_of(rank=PARTNER, world_size=WORLD, step=5), None)
    assert copy_snapshot(pair.partner, own, 1, at=lambda stage: None) is not None
    blocks, free = 1 << 20, 2 * own.nbytes - 1  # for the partner's second snapshot, and a copy: not quite

    def almost_full(path: object) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=1)

    monkeypatch.setattr("mindx_elastic.mirror.nearby.os.statvfs", almost_full)
    pair.snapshot(5)
    pair.copy()
    assert "beside those of its own ranks" in "".join(pair.failed) and pair.steps == []
    free += 8192  # the two have headers of their own
    pair.snapshot(6)
    pair.copy()
    assert pair.steps == [6]
    blocks = free = 0  # a tmpfs without a limit
    pair.snapshot(7)
    pair.copy()
    assert pair.steps == [6, 7]


def test_a_snapshot_that_is_there_is_not_sent_again_and_is_overwritten_last(pair: Pair) -> None:
    for step in (5, 6):
        pair.snapshot(step, sealed=True)
        pair.copy()
    written = pair.path_of(5).stat().st_mtime_ns
    pair.arena.keep(pair.arena.record(0).attempt, 5)  # the job has gone on from 5 again
    pair.copy()
    assert (pair.steps, pair.path_of(5).stat().st_mtime_ns) == ([5, 6], written)
    pair._sequence = pair.arena.newest().sequence
    pair.snapshot(7)
    pair.copy()
    assert (pair.steps, pair.failed) == ([5, 7], [])


def test_a_copy_does_not_make_damage_sound(pair: Pair) -> None:
    pair.snapshot(5, sealed=True)
    (slot,) = [slot for slot in pair.arena.slots if slot.map is not None]
    assert slot.map is not None
    slot.map[-1] ^= 1
    pair.copy()
    assert verify_file(pair.path_of(5))


def test_nodes_that_share_their_memory_are_told_so(pair: Pair) -> None:
    folder = job_folder(pair.memories[0], pair.disk) / f"rank_{SOURCE}"
    folder.mkdir(mode=0o700)
    with locked_elsewhere(folder / "lock"):
        pair.snapshot(5)
        pair.copy()
    assert len(pair.failed) == 1 and "nodes that share one memory need no copies" in pair.failed[0]


def test_too_short_an_interval_is_told_with_one_that_is_not(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    step = 0

    def pass_three() -> None:
        nonlocal step
        for _ in range(3):
            step += 1
            pair.snapshot(step)

    pair.in_transfer = pass_three
    pass_three()
    with caplog.at_level(logging.WARNING, "mindx_elastic"):
        for _ in range(12):
            pair.copy()
    (line,) = [record.message for record in caplog.records]
    assert "--snapshot-every 6 or more" in line


@pytest.mark.parametrize("keep", [True, False])
def test_copies_go_or_stay_with_the_memory_of_the_rank_that_keeps_them(pair: Pair, keep: bool) -> None:
    pair.snapshot(5)
    pair.copy()
    pair.server.close(keeps_memory=keep)
    assert pair.kept.exists() == keep


def test_a_new_node_takes_a_snapshot_from_there_and_can_store_or_delete_nothing_else(pair: Pair) -> None:
    pair.snapshot(5)
    pair.copy()
    name = f"rank_{SOURCE}/{pair.path_of(5).name}"
    with pair.ask("get", root=1, name=name) as channel:
        assert channel.answer()["size"] == pair.path_of(5).stat().st_size
    for op in ("put", "drop"):
        with (
            pair.ask(op, root=1, name=name, run_id="run-a") as channel,
            pytest.raises(ConnectionError, match="no dir"),
        ):
            channel.answer()
    with pair.ask("keep", size=0, head=0) as channel, pytest.raises(ConnectionError, match="cannot be"):
        channel.answer()
    assert pair.steps == [5]


def test_a_copy_that_is_broken_off_at_the_end_is_no_trouble(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        partner = Endpoint("127.0.0.1", listener.getsockname()[1], "0")
        ranks, events = RankInfo(rank=SOURCE, world_size=WORLD), EventLog(tmp_path / "events.jsonl")
        mirror = Mirror(ranks, [pair.disk], [PARTNER], {PARTNER: partner}, None, events, None, pair.arena)  # type: ignore[arg-type]
        info = info_of(rank=SOURCE, world_size=WORLD, step=5)
        snapshot = lay_out({"large": torch.zeros(64 << 20, dtype=torch.uint8)}, info, None)
        assert copy_snapshot(pair.arena, snapshot, 1, at=lambda stage: None) is not None
        assert mirror.nearby is not None
        mirror.nearby.copy_newest()
        with Channel(listener.accept()[0]) as channel:
            assert channel.receive()["op"] == "keep"
            channel.send({"send": True})  # and nothing is read: it waits in the middle
            channel._receive_exactly(1 << 20)
            mirror._sender.submit(lambda: time.sleep(0.3))  # the copy of a file, which takes a moment to end
            mirror.close()
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_memory_that_somebody_has_emptied_is_told_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for step in (5, 6):
        pair.snapshot(step)
    for slot in pair.arena.slots:
        slot.path.unlink()
    for step in (7, 8):
        pair.snapshot(step)
        pair.copy()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "go to no other node" in record.message and record.exc_info is None
