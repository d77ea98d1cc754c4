"""Whose files count. What strangers do is done by a second user, so these tests need root."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mindx_elastic.cli.app import app
from mindx_elastic.config import RankInfo, SharingSettings
from mindx_elastic.core.owners import Trust, check_place, find_owners, user_ids
from mindx_elastic.errors import NoUsableCheckpointError, UnsafeDirectoryError, UsageError
from mindx_elastic.memory.memory_files import known_runs
from mindx_elastic.persist.reader import read_checkpoint
from mindx_elastic.start import shares as reading_module
from mindx_elastic.start.directories import prepare_directories
from tests.checkpoint_files import write
from tests.guarded import Job
from tests.start.finding import find, step_of

STRANGER, COLLEAGUE = 65534, 65533
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own is not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def run_as(user: int, *command: object, group: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), user=user, group=user if group is None else group, extra_groups=[],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def copy_in(source: Path, target: Path, user: int = STRANGER, group: int | None = None) -> Path:
    """`user` copies a file in, as anybody does who may write there."""
    source.chmod(0o644)
    done = run_as(user, "cp", source, target, group=group)
    assert done.returncode == 0, done.stderr
    assert target.stat().st_uid == user
    return target


@pytest.fixture
def forged(place: Path) -> Path:
    """A sealed checkpoint of a step that the job has never reached."""
    return write(place / "elsewhere" / "resnet-9_9.safetensors", step=89, state={"model": {"evil": 1.0}})


@needs_root
def test_a_forged_file_in_an_own_world_writable_directory_is_refused_and_left_out(
    place: Path, forged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = place / "ckpt"
    Job(directory, final_save=False).run(epochs=1)
    directory.chmod(0o777)
    target = copy_in(forged, directory / "job-9_9_breakpoint.safetensors")
    with pytest.raises(UnsafeDirectoryError, match=r"others may write to it \(mode 777\)"):
        Job(directory).run()
    job = Job(directory, allow_shared_directory=True)
    with pytest.raises(NoUsableCheckpointError, match=f"belongs to user {STRANGER}.*trusted_users"):
        job.run()
    named = [r.message for r in caplog.records if str(target) in r.message and "left out" in r.message]
    assert len(named) == 1 and f"belongs to user {STRANGER}" in named[0]
    assert target.exists() and not (directory / "quarantine").exists()


@needs_root
def test_a_world_writable_parent_without_the_sticky_bit_is_refused(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    directory = place / "open" / "mine" / "ckpt"
    with pytest.raises(UnsafeDirectoryError, match=f"others may write to {place}/open"):
        Job(directory).run()
    assert not directory.exists() and not directory.parent.exists()
    (place / "open").chmod(0o1777)
    Job(directory).run(epochs=1)
    (place / "open").chmod(0o777)
    Job(directory, allow_shared_directory=True).run(epochs=1)


@needs_root
def test_a_name_that_a_stranger_took_in_a_sticky_folder_is_refused(place: Path) -> None:
    common = place / "tmp"
    common.mkdir()
    common.chmod(0o1777)
    assert run_as(STRANGER, "mkdir", common / "ckpt").returncode == 0
    with pytest.raises(UnsafeDirectoryError, match=f"belongs to user {STRANGER}.*that user could have made it"):
        check_place(common / "ckpt" / "below")
    assert STRANGER not in find_owners(common / "ckpt").uids
    assert run_as(STRANGER, "ln", "-s", place, common / "link").returncode == 0
    with pytest.raises(UnsafeDirectoryError, match="that user could have made it"):
        check_place(common / "link" / "ckpt")
    (common / "own").symlink_to("mine")
    (common / "mine").mkdir()
    check_place(common / "own")


@needs_root
def test_a_directory_of_another_user_is_named_and_only_its_owner_counts_too(
    place: Path, forged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Root in a container, on a volume that has the uid of the image's user."""
    directory = place / "ckpt"
    write(directory / "resnet-1_1.safetensors", step=1)
    write(directory / "resnet-1_2.safetensors", step=2)
    os.chown(directory, COLLEAGUE, -1)
    os.chown(directory / "resnet-1_2.safetensors", COLLEAGUE, -1)
    shutil.copy(forged, directory)
    os.chown(directory / forged.name, STRANGER, -1)
    resolved, trust = prepare_directories([directory], RankInfo(), SharingSettings())
    assert resolved[directory] == directory
    assert f"{directory} belongs to user {COLLEAGUE}" in caplog.text
    assert trust.of(directory).uids == {0, COLLEAGUE}
    assert step_of(find(directory)) == 2


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link", "loose"])
def test_a_rank_folder_of_a_stranger_is_refused(place: Path, kind: str) -> None:
    directory = place / "ckpt"
    (directory / "elsewhere").mkdir(parents=True)
    folder = directory / "rank_1"
    if kind == "link":
        folder.symlink_to(directory / "elsewhere")
        os.lchown(folder, STRANGER, -1)
    else:
        folder.mkdir()
        if kind == "folder":
            os.chown(folder, STRANGER, -1)
        else:
            folder.chmod(0o777)
    ranks = RankInfo(rank=1, world_size=2)
    with pytest.raises(UnsafeDirectoryError, match=r"rank_1.*(belongs to|symbolic link of|others may write)"):
        prepare_directories([directory], ranks, SharingSettings())
    prepare_directories([directory], RankInfo(rank=0, world_size=2), SharingSettings())
    if kind == "loose":
        prepare_directories([directory], ranks, SharingSettings(allow_shared=True))
    else:
        prepare_directories([directory], ranks, SharingSettings(trusted_users=(STRANGER,)))


@needs_root
def test_a_file_that_is_exchanged_between_the_look_and_the_read_is_not_read(
    tmp_path: Path, forged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "resnet-1_1.safetensors", step=1)
    victim = write(tmp_path / "resnet-1_2.safetensors", step=2)
    exchanged: list[Path] = []

    def exchange_first(path: Path, **options: Any) -> Any:
        if path == victim and not exchanged:
            os.chown(forged, STRANGER, -1)
            os.replace(forged, victim)
            exchanged.append(path)
        return read_checkpoint(path, **options)

    monkeypatch.setattr(reading_module, "read_checkpoint", exchange_first)
    found = find(tmp_path)
    assert exchanged and step_of(found) == 1 and found is not None
    assert any(f"belongs to user {STRANGER}" in line for line in found.rejected), found.rejected
    assert victim.exists() and not (tmp_path / "quarantine").exists()


@needs_root
@pytest.mark.parametrize("kind", ["stranger's", "link", "loose"])
def test_a_stranger_s_event_log_is_neither_believed_nor_written_to(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    log, target = tmp_path / "events.jsonl", tmp_path / "precious"
    target.write_text('{"run_id": "forged"}\n')
    if kind == "link":
        log.symlink_to(target)
    else:
        shutil.copy(target, log)
        log.chmod(0o666 if kind == "loose" else 0o644)
        os.chown(log, STRANGER if kind == "stranger's" else 0, -1)
    assert known_runs([tmp_path], trust=Trust()) == set()
    Job(tmp_path).run(epochs=1)
    (aside,) = tmp_path.glob("events.jsonl.untrusted-*")
    assert "is moved to" in caplog.text and target.read_text() == '{"run_id": "forged"}\n'
    assert log.is_file() and not log.is_symlink() and log.stat().st_uid == 0 and "forged" not in log.read_text()
    assert aside.read_text() == '{"run_id": "forged"}\n'


@needs_root
@pytest.mark.parametrize("command", ["inspect", "verify", "plan"])
def test_the_commands_believe_whom_a_start_believes(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "resnet-1_2.safetensors", step=2)
    os.chown(path, COLLEAGUE, -1)
    for target in (tmp_path, path) if command != "plan" else (tmp_path,):
        monkeypatch.delenv("MINDX_TRUSTED_USERS", raising=False)
        assert f"belongs to user {COLLEAGUE}" in CliRunner().invoke(app, [command, str(target)]).output
        monkeypatch.setenv("MINDX_TRUSTED_USERS", f"{COLLEAGUE}")
        done = CliRunner().invoke(app, [command, str(target)])
        assert done.exit_code == 0 and "belongs to user" not in done.output, done.output
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing was made there"


@needs_root
def test_our_own_files_are_nobody_else_s_to_write_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Job(tmp_path / "ckpt").run(epochs=1)
        job = Job(tmp_path / "ckpt", resume="never")
        job.run(epochs=1, after=lambda job, step: job.guard.save())
    finally:
        os.umask(old)
    files = list((tmp_path / "ckpt").rglob("*"))
    assert files
    for path in [tmp_path / "ckpt", *files]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0, path


def test_our_name_on_the_file_system_is_learnt_from_a_file_that_we_make(tmp_path: Path) -> None:
    """Root squash: what root writes belongs to nobody."""
    made = list(os.stat(tmp_path))
    made[stat.ST_UID], made[stat.ST_MODE] = STRANGER, stat.S_IFREG | 0o644
    owners = find_owners(tmp_path, created=os.stat_result(made))
    assert STRANGER in owners.uids and owners.seen_as == STRANGER and owners.modes_count
    (tmp_path / "other").mkdir()
    made[stat.ST_DEV] = os.stat(tmp_path).st_dev
    trust = Trust({tmp_path / "ckpt": find_owners(tmp_path, created=os.stat_result(made))})
    assert STRANGER in trust.of(tmp_path / "other").uids  # the same file system


def test_where_modes_mean_nothing_they_are_not_looked_at(tmp_path: Path) -> None:
    made = list(os.stat(tmp_path))
    made[stat.ST_MODE] = stat.S_IFREG | 0o777
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o777)
    status = (tmp_path / "file").stat()
    assert find_owners(tmp_path, created=os.stat_result(made)).problem(status) is None
    assert find_owners(tmp_path).problem(status) is not None


def test_users_by_number_and_name() -> None:
    assert user_ids([5, "7", "root", " root "]) == {5, 7, 0}
    for wrong in ("root", 5, [True], [-1], [None], ["no such user"]):
        with pytest.raises(UsageError, match="trusted_users"):
            user_ids(wrong)  # type: ignore[arg-type]


def test_links_on_the_way_are_all_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    check_place(tmp_path / "a" / "c")  # for whoever opens it
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    (loose / "link").symlink_to("../fine/below")
    (tmp_path / "fine" / "below").mkdir(parents=True)
    (tmp_path / "way").symlink_to(loose / "link")
    check_place(tmp_path / "fine")
    with pytest.raises(UnsafeDirectoryError, match="loose"):
        check_place(tmp_path / "way")
    with pytest.raises(UnsafeDirectoryError, match="loose"):
        check_place(tmp_path / "fine" / ".." / "loose")
