"""Every folder that is made for a durable file is flushed into its parent before the file is reported durable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.agent.holder import flush
from mindx_elastic.alarm.alarm import ALARM_KINDS
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.convert.conversion import ConversionRequest, convert
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.guard.policy import breakpoint_policy
from mindx_elastic.guard.saver import Saver
from mindx_elastic.mirror.wire import incoming
from mindx_elastic.persist.direct_io import BlockWriter
from mindx_elastic.persist.storage import prepare_owned_directory, quarantine
from mindx_elastic.platforms.small_files import write_whole
from mindx_elastic.platforms.tft_tree import settle_tft_file, tft_path
from mindx_elastic.train.request_exit import export_network
from tests.checkpoint_files import write
from tests.simulation.disk import Disk
from tests.start.arenas import RUN, Machine


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path).active() as made:
        yield made


class Log(EventLog):
    """Looks at each file in the moment in which it is reported as saved."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path, run_id="run")
        self.disk, self.reported = disk, 0

    def emit(self, event: str, *, outcome: str | None = None, **more: Any) -> None:
        if outcome == "saved":
            self.disk.check(Path(more["path"]))
            self.reported += 1
        super().emit(event, outcome=outcome, **more)


def saver(directory: Path, disk: Disk, rank: int) -> Saver:
    collector = Collector({"model": nn.Linear(4, 4)})
    collector.copy(Position(3, 1, 3, 10))
    return Saver(collector, RankInfo(rank=rank, world_size=2), Log(directory / "events.jsonl", disk))


def by_nobody(disk: Disk, directory: Path) -> None:
    pass


def by_another_process(disk: Disk, directory: Path) -> None:
    """That was killed, or has not come to flush it."""
    for rank in range(2):
        (directory / f"rank_{rank}").mkdir()


@pytest.mark.parametrize("made", [by_nobody, by_another_process])
@pytest.mark.parametrize("how", ["dying", "by hand", "below", "two names"])
def test_a_reported_save_survives(disk: Disk, tmp_path: Path, made: Callable[[Disk, Path], None], how: str) -> None:
    directory = prepare_owned_directory(tmp_path / "runs" / "ckpt")[0]
    made(disk, directory)
    for rank in range(2):
        one = saver(directory, disk, rank)
        policies = [breakpoint_policy("x", directory, ALARM_KINDS, ())]
        if how == "dying":
            one.save_dying(policies, "test")
        elif how == "by hand":
            one.save_to(None, directory, "x", "test")
        elif how == "below":
            one.save_to(tmp_path / "some" / "where" / f"rank_{rank}" / "x.safetensors", directory, "x", "test")
        else:
            second = tmp_path / "second" / "place"
            one.save_dying([*policies, breakpoint_policy("y", second, ALARM_KINDS, ())], "test")
            disk.check(second / f"rank_{rank}" / "y-1_3_breakpoint.safetensors")
        assert isinstance(one.events, Log) and one.events.reported == 1
        assert any(call.startswith("mkdir") for call in disk.calls)


def test_a_ttp_tree_survives(disk: Disk, tmp_path: Path) -> None:
    root = prepare_owned_directory(tmp_path / "ckpt")[0]
    paths = [tft_path(root, step=3, rank=rank, epoch=1, step_in_epoch=3) for rank in range(2)]
    for rank, path in enumerate(paths):
        one = saver(root, disk, rank)
        one.save_to(path, root, "x", "test")
        disk.check(settle_tft_file(path, world_size=2, gone=lambda: {0, 1}))


def test_a_planners_file_survives(disk: Disk, tmp_path: Path) -> None:
    disk.check(write_whole(tmp_path / "a" / "b" / "c" / "strategy.proto", b"x"))
    (tmp_path / "d").mkdir()
    disk.check(write_whole(tmp_path / "d" / "strategy.proto", b"x"))


def test_a_copy_from_another_node_survives(disk: Disk, tmp_path: Path) -> None:
    class Sender:
        def receive_file(self, blocks: BlockWriter, size: int) -> None:
            blocks.put(torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8))

    source = write(tmp_path / "source" / "x.safetensors")
    target = tmp_path / "a" / "rank_0" / "copy.safetensors"
    with incoming(target, source.stat().st_size, rank=0, world_size=1) as receive:
        receive(Sender())  # type: ignore[arg-type]
    disk.check(target)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, 2)


def test_what_the_holder_writes_survives(machine: Machine, tmp_path: Path) -> None:
    machine.know(RUN)
    machine.snapshot(9)
    arena = machine.arena(0)
    arena.describe(machine.directory, RUN)
    arena.close()
    with Disk(tmp_path).active() as disk:
        (machine.directory / "rank_1").mkdir()
        flushed = flush(machine.job)
        assert flushed.step == 9, flushed.lines
        files = sorted(machine.directory.rglob("*.safetensors"))
        assert len(files) == 2
        for file in files:
            disk.check(file)


def test_what_is_put_aside_survives(disk: Disk, tmp_path: Path) -> None:
    directory = prepare_owned_directory(tmp_path / "ckpt" / "deep")[0]
    disk.check(directory)
    path = write(directory / "x.safetensors")
    disk.check(quarantine(path, "test", directory))


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_converted_file_survives(disk: Disk, tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "source" / "x.safetensors")
    convert(ConversionRequest(source=source, destination=tmp_path / name))
    disk.check(tmp_path / name)


def test_an_exported_network_survives(disk: Disk, tmp_path: Path) -> None:
    directory = prepare_owned_directory(tmp_path / "ckpt")[0]
    export_network(nn.Linear(4, 4), (torch.ones(2, 4), torch.zeros(2)), directory / "x.pt2")
    disk.check(directory / "x.pt2")
