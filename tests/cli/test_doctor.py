"""The command on this machine: real writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MINDX_", "MS_", "TORCHELASTIC")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("mindx_elastic.doctor.places._MEASURE_S", 0.05)


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_directory_that_is_not_there_yet(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_GRACE", "60")
    result = run("doctor", tmp_path / "ckpt", "--state", "1.024MiB")
    assert result.exit_code == ("problem" in result.stdout)
    assert list(tmp_path.iterdir()) == [], "it leaves nothing, and makes no directory"
    said = words(result.stdout)
    assert "of your 30 s of grace" in said and "a state of 1.0 MiB" in said and "two snapshots of 1.0 MiB" in said
    assert "MINDX_GRACE is read by nothing" in said and "-> MINDX_GRACE_S?" in said


def test_too_large_for_the_disk_is_1(run: Run, tmp_path: Path) -> None:
    result = run("doctor", tmp_path, "--state", "1023TiB")
    assert result.exit_code == 1
    assert "a stop cannot save" in words(result.stdout) and "->" in result.stdout


def test_memory_is_no_place_for_checkpoints(run: Run) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    result = run("doctor", "/dev/shm/mindx-doctor-test")
    assert "in memory" in words(result.stdout) and result.exit_code == 1
    assert not os.path.exists("/dev/shm/mindx-doctor-test")


def test_a_file_system_that_cannot_be_written_to(run: Run) -> None:
    result = run("doctor", "/proc")
    assert "writing to /proc (proc) fails" in words(result.stdout) and result.exit_code == 1


@pytest.mark.parametrize("wrong", [("--state", "18"), ("--grace", "0")])
def test_wrong_usage_is_2(run: Run, tmp_path: Path, wrong: tuple[str, str]) -> None:
    assert run("doctor", tmp_path, *wrong).exit_code == 2
