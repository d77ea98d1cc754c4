"""What a start does with its directories, on a whole guard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agreement.gather import Answer
from mindx_elastic.config import RankInfo, SharingSettings
from mindx_elastic.core.owners import Trust, find_owners
from mindx_elastic.errors import DirectoryInUseError, GracefulExit, MismatchError, UsageError
from mindx_elastic.guard.policy import ExitPolicy
from mindx_elastic.persist import directory_lock as lock_module
from mindx_elastic.persist.directory_lock import hold_directory
from mindx_elastic.start.directories import RankDirectories, hold_directories, prepare_directories
from tests.guarded import Job, no_traces, stop_and_wait


def stop(job: Job) -> Path:
    with pytest.raises(GracefulExit) as caught:
        job.run(middle=lambda job, step: stop_and_wait(job) if step == 2 else None)
    assert caught.value.path is not None
    return caught.value.path


@contextmanager
def evaluation(directory: Path) -> Iterator[None]:
    policy = ExitPolicy(
        kind="eval", alarms=frozenset({"signal"}), name=lambda position: "Net_eval.safetensors", directory=directory
    )
    with no_traces(), Job(directory, policies=[policy], resume="never").guard:
        yield


def test_a_refused_guard_leaves_no_trace_and_an_evaluation_may_run_beside_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_MARGIN_S", 0.0)
    training = hold_directory(tmp_path, RankInfo(), find_owners(tmp_path), grace_s=0.0)
    assert training is not None
    with no_traces(), pytest.raises(DirectoryInUseError):
        Job(tmp_path, grace_s=0.5).run()
    with evaluation(tmp_path):
        pass
    training.close()


def test_another_prefix_is_refused_and_each_way_out_works(tmp_path: Path) -> None:
    path = stop(Job(tmp_path / "ckpt", prefix="resnet"))
    renamed = path.rename(path.with_name("bert-1_2_breakpoint.safetensors"))  # names are for people
    with no_traces(), pytest.raises(MismatchError, match=r"another job's.*'resnet'.*'bert'.*resume=") as caught:
        Job(tmp_path / "ckpt", prefix="bert").run()
    assert caught.value.path == renamed
    onward = Job(tmp_path / "ckpt", prefix="bert", resume=renamed, final_save=False)
    onward.run(epochs=1)
    assert onward.steps[0] == 3
    assert Job(tmp_path / "own", prefix="bert").run(epochs=1)
    anew = Job(tmp_path / "ckpt", prefix="bert", resume="never", final_save=False)
    anew.run(epochs=1)
    assert anew.steps[0] == 1
    again = Job(tmp_path / "ckpt", prefix="resnet")
    again.run(epochs=1)
    assert again.steps[0] == 3


def test_left_overs_go_when_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predecessor that is waited for may be in the middle of a save."""
    temp = tmp_path / "rank_0" / ".resnet-1_1.0123.mindx-tmp"
    temp.parent.mkdir(parents=True)
    temp.write_bytes(b"finished")
    ranks, seen = RankInfo(rank=0, world_size=2), []

    def waits(*args: Any, **more: Any) -> Any:
        seen.append(temp.exists())
        return hold_directory(*args, **more)

    monkeypatch.setattr("mindx_elastic.start.directories.hold_directory", waits)
    _, trust = prepare_directories([tmp_path], ranks, SharingSettings())
    with ExitStack() as stack:
        hold_directories(stack, trust, ranks, grace_s=0.0)
        assert seen == [True] and not temp.exists()


def test_an_evaluation_beside_a_training_leaves_its_files_alone(tmp_path: Path) -> None:
    (tmp_path / ".resnet-1_1.0123.mindx-tmp").write_bytes(b"of a writer that may live")
    with evaluation(tmp_path):
        assert (tmp_path / ".resnet-1_1.0123.mindx-tmp").exists()


@pytest.mark.parametrize(
    ("first", "second", "is_right"),
    [
        ("ckpt_of_rank/0", "ckpt_of_rank/1", True),
        ("one", "one", True),
        ("2026-11-29/10-00-49", "2026-11-29/10-00-50", False),
        ("data0/10-00-07/0", "data0/10-00-08/1", False),
    ],
)
def test_ranks_of_a_job_have_one_directory_or_one_by_their_number(
    tmp_path: Path, first: str, second: str, is_right: bool
) -> None:
    parts = []
    for rank, name in enumerate((first, second)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        ranks = RankInfo(rank=rank, world_size=2, local_rank=rank)
        parts.append(RankDirectories([tmp_path / name], Trust(), ranks, apart=False))
    said = [part.say() for part in parts]
    if is_right:
        for part in parts:
            part.hear(Answer(parts[0].merge(said).common, None, lambda keys: []))
            assert {tmp_path / first, tmp_path / second} >= set(part.all)
        return
    with pytest.raises(UsageError, match=rf"differ: rank 0 saves in .*{first}, rank 1 in .*{second}\. Give one"):
        parts[0].merge(said)
