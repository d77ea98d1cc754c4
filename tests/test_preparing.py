"""What a start does with its directories, on a whole guard."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.config import RankInfo
from mindx_elastic.errors import DirectoryInUseError, GracefulExit, MismatchError
from mindx_elastic.owners import find_owners
from mindx_elastic.persist import directory_lock as lock_module
from mindx_elastic.persist.directory_lock import hold_directory
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.storage import LOCK_FILE
from mindx_elastic.policy import ExitPolicy, breakpoint_policy
from tests import checkpoint_files
from tests.guarded import Job, no_traces, stop_and_wait


def stop(job: Job) -> Path:
    with pytest.raises(GracefulExit) as caught:
        job.run(middle=lambda job, step: stop_and_wait(job) if step == 2 else None)
    assert caught.value.path is not None
    return caught.value.path


def test_a_guard_holds_its_directories_until_it_is_left(tmp_path: Path) -> None:
    other = breakpoint_policy("job", tmp_path / "b", [15])
    job = Job(tmp_path / "a", policies=[other])
    with no_traces(), job.guard:
        assert (tmp_path / "a" / LOCK_FILE).exists() and (tmp_path / "b" / LOCK_FILE).exists()
    assert not (tmp_path / "a" / LOCK_FILE).exists() and not (tmp_path / "b" / LOCK_FILE).exists()


def test_a_refused_guard_leaves_no_trace_and_an_evaluation_may_run_beside_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_MARGIN_S", 0.0)
    training = hold_directory(tmp_path, RankInfo(), find_owners(tmp_path), grace_s=0.0)
    assert training is not None
    with no_traces(), pytest.raises(DirectoryInUseError):
        Job(tmp_path, grace_s=0.5).run()
    policy = ExitPolicy(
        kind="eval", alarms=frozenset({"signal"}), name=lambda position: "Net_eval.safetensors", directory=tmp_path
    )
    with no_traces(), Job(tmp_path, policies=[policy], resume="never").guard:
        pass
    training.close()


def test_every_file_says_what_its_job_calls_its_files(tmp_path: Path) -> None:
    path = stop(Job(tmp_path, prefix="resnet"))
    assert read_header(path).info.names == ("resnet",)


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


def test_one_job_may_have_several_prefixes_and_change_one(tmp_path: Path) -> None:
    first = [breakpoint_policy(name, tmp_path, [15]) for name in ("stop", "request")]
    stop(Job(tmp_path, policies=first))
    second = Job(tmp_path, policies=[breakpoint_policy(name, tmp_path, [15]) for name in ("request", "new")])
    second.run(epochs=1)
    assert second.steps[0] == 3


def test_files_without_names_are_anybody_s(tmp_path: Path) -> None:
    """An older version's, and what was converted."""
    path = checkpoint_files.write(tmp_path / "x.safetensors", step=1)
    assert read_header(path).info.names == ()
