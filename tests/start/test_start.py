"""The start of a guard: one run id for all ranks, parts loaded in the right order, and a word about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import ddp_modules
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.errors import MismatchError
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.platforms.at_start import PlatformAtStart
from mindx_elastic.start.start import Start, is_another_job, start_job
from tests.checkpoint_files import write
from tests.harness import events
from tests.start.shared_store import Board, BoardExchange, on_all_ranks


class Loader:
    """The part of a loader that the start uses."""

    def __init__(self) -> None:
        self.on_iterator_ready: Any = None
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(1)  # loading may draw, too
        self.batch = state["batch"]


def targets(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": nn.Linear(2, 2), "loader": Loader()}


def start(
    directory: Path,
    targets: Mapping[str, Any],
    ranks: RankInfo | None = None,
    exchange: Exchange | None = None,
    *,
    collector: Collector | None = None,
    risks: Unmanaged | None = None,
) -> Start:
    """What `Guard` does between opening its connections and training: no agent, no memory, no other nodes."""
    collector = collector or Collector(targets)
    ranks = ranks or RankInfo()
    events = EventLog(directory / "events.jsonl")
    saver = Saver(collector, ranks, events, resolved={directory: directory})
    with ExitStack() as stack:
        around = Connections(stack, [directory], saver, 0, None, exchange or Exchange(), evaluates=True)
        return start_job(
            [directory],
            collector=collector,
            targets=targets,
            job=saver,
            resume="auto",
            around=around,
            platform=PlatformAtStart(ranks, saver.flags),
            risks=risks or Unmanaged("error"),
            ddp=ddp_modules(targets),
            look_in=[directory],
        )


def save(directory: Path, parts: dict[str, Any], **info: Any) -> Path:
    collector = Collector(parts)
    collector.copy(Position(step=7, epoch=2, step_in_epoch=3, batch_num=4))
    return write(directory / "net-2_3.safetensors", step=7, epoch=2, step_in_epoch=3, state=collector.state(), **info)


def test_all_ranks_of_a_fresh_start_have_one_run_id_of_their_own(tmp_path: Path) -> None:
    ids: list[str] = []
    for attempt in range(2):

        def begin(rank: int, exchange: Any) -> Start:
            return start(tmp_path, targets(0), RankInfo(rank=rank, world_size=3, attempt=attempt), exchange)  # noqa: B023

        begun = [one for one in on_all_ranks(3, begin) if isinstance(one, Start)]
        assert [(one.resumed, one.attempt) for one in begun] == [(None, attempt)] * 3
        ids += {one.run_id for one in begun}
    assert len(set(ids)) == len(ids) == 2 and all(ids)
    assert {(e["event"], e["outcome"]) for e in events(tmp_path)} == {("start", "fresh")}


def test_what_one_rank_knows_against_an_exact_resume_is_told_to_all(tmp_path: Path) -> None:
    """That rank may be killed before it saves."""
    risks = [Unmanaged("error"), Unmanaged("error")]
    risks[1].inherit(["its random numbers are new"])

    def begin(rank: int, exchange: Any) -> Start:
        info = RankInfo(rank=rank, world_size=2)
        return start(tmp_path, targets(0), ranks=info, exchange=exchange, risks=risks[rank])

    on_all_ranks(2, begin)
    assert [each.notes for each in risks] == [("its random numbers are new",)] * 2


def test_the_random_streams_come_last_and_can_be_put_back_again(tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved = targets(1)
    saved["loader"].batch = 9
    path = save(tmp_path, saved)
    expected = torch.rand(3)

    parts = targets(2)
    begun = start(tmp_path, parts)
    assert begun.resumed is not None and begun.resumed.path == path
    assert parts["loader"].batch == 9
    assert torch.equal(torch.rand(3), expected)
    assert begun.restore_streams is not None
    begun.restore_streams()
    assert torch.equal(torch.rand(3), expected), "what the program drew meanwhile does not count"


def test_the_run_goes_on_under_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mindx_elastic")
    save(tmp_path, targets(1), run_id="the run", attempt=4, reason="SIGTERM", kind="breakpoint")
    begun = start(tmp_path, targets(2))
    assert (begun.run_id, begun.attempt) == ("the run", 5)
    assert "step 7 (epoch 2, step 3), saved because of SIGTERM" in caplog.text
    (event,) = events(tmp_path)
    assert (event["event"], event["run_id"], event["attempt"], event["step"]) == ("resume", "the run", 5, 7)


def test_the_launchers_count_of_restarts_wins_when_it_is_higher(tmp_path: Path) -> None:
    save(tmp_path, targets(1), attempt=1)
    assert start(tmp_path, targets(2), RankInfo(attempt=6)).attempt == 6


def test_a_part_that_is_no_longer_used_is_named_and_a_new_one_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, {**targets(1), "ema": nn.Linear(1, 1)})
    start(tmp_path, targets(2))
    assert "the checkpoint also holds ema, which this job does not use" in caplog.text
    with pytest.raises(MismatchError, match="holds nothing for swa"):
        start(tmp_path, {**targets(2), "swa": nn.Linear(1, 1)})


def test_the_ranks_meet_five_times_and_each_reads_little_of_what_the_others_say(tmp_path: Path) -> None:
    """A start of more ranks costs each rank no more: it reads its own share and what is common."""
    sizes: dict[int, int] = {}
    for world_size in (2, 6):
        board = Board(world_size)
        read: dict[int, int] = dict.fromkeys(range(world_size), 0)

        class Counting(BoardExchange):
            def _read(self, keys: Sequence[str], authors: Sequence[int | None]) -> list[str]:
                found = super()._read(keys, authors)
                read[self.rank] += sum(map(len, found))  # noqa: B023
                return found

        def enter(rank: int, exchange: Any) -> Start:
            info = RankInfo(rank=rank, world_size=world_size)  # noqa: B023
            return start(tmp_path / str(world_size), targets(0), info, Counting(board, rank))  # noqa: B023

        (tmp_path / str(world_size)).mkdir()
        assert all(isinstance(each, Start) for each in on_all_ranks(world_size, enter))
        rounds = {key.split("/")[1] for key in board.values if key.startswith("start/round")}
        assert rounds == {"round0", "round1", "round2"}, "here, plan, loaded; then read (with files) and entered"
        sizes[world_size] = max(read[rank] for rank in range(1, world_size))
    assert sizes[6] < sizes[2] + 5 * 200, "what grows are the process ids of one machine's ranks"


@pytest.mark.parametrize(
    ("own", "another"),
    [
        (["bert"], True),
        (["CKP", "ckpt", "bert"], True),  # nobody has chosen what they have in common
        (["CKP", "ckpt"], False),  # the callback that had a name of its own was removed
        (["resnet", "stop"], False),  # a callback was exchanged for another
        ([], False),
    ],
)
def test_whether_files_are_another_job_s(own: list[str], another: bool) -> None:
    assert is_another_job(["CKP", "ckpt", "resnet"], own) is another
    assert not is_another_job([], own), "an older version's, or converted"
