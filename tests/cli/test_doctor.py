"""The command on this machine: real writes, a real checkpoint, real permissions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_files import write
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("MINDX_", "MS_", "TORCHELASTIC", "SLURM_", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MINDX_ALLOW_SHARED_DIRECTORY", "1")  # the test's folder may be in one
    monkeypatch.setattr("mindx_elastic.doctor.places._MEASURE_S", 0.05)


def findings(document: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [finding for finding in document["findings"] if finding["check"] == check]


def test_a_directory_that_is_not_there_yet(run: Run, tmp_path: Path) -> None:
    result = run("doctor", tmp_path / "ckpt", "--state", "1.024MiB", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == (document["worst"] == "problem")
    assert list(tmp_path.iterdir()) == [], "it leaves nothing, and makes no directory"
    assert any("of your 30 s of grace" in finding["text"] for finding in findings(document, "disk speed"))
    assert document["state_bytes"] == int(1.024 * (1 << 20))
    checks = {finding["check"] for finding in document["findings"]}
    assert {"owners", "directory", "disk space", "shared memory", "variables"} <= checks
    assert all(finding["remedy"] for finding in document["findings"] if finding["level"] != "good")


def test_the_size_comes_from_the_newest_checkpoint(run: Run, tree: Path) -> None:
    before = sorted(tree.rglob("*"))
    document = json.loads(run("doctor", tree, "--nproc-per-node", 2, "--json").stdout)
    assert sorted(tree.rglob("*")) == before
    assert any("step 17, 2 ranks: complete" in finding["text"] for finding in findings(document, "checkpoints"))
    assert document["state_bytes"] > 0 and document["ranks"] == 2


def test_too_large_for_the_disk_is_1(run: Run, tmp_path: Path) -> None:
    result = run("doctor", tmp_path, "--state", "1023TiB")
    assert result.exit_code == 1
    assert "a stop cannot save" in " ".join(result.stdout.split()) and "->" in result.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user")
def test_files_of_another_user(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "resnet-1_1.safetensors", step=1)
    os.chown(tmp_path / "resnet-1_1.safetensors", 4711, -1)
    result = run("doctor", tmp_path, "--json")
    owners = [each for each in findings(json.loads(result.stdout), "owners") if each["level"] == "problem"]
    assert result.exit_code == 1 and "4711" in owners[0]["text"]
    assert "MINDX_TRUSTED_USERS=4711" in owners[0]["remedy"]


def test_a_folder_that_others_may_write_to(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINDX_ALLOW_SHARED_DIRECTORY")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    result = run("doctor", tmp_path / "open", "--json")
    (owners,) = findings(json.loads(result.stdout), "owners")
    assert result.exit_code == 1 and owners["level"] == "problem" and "chmod o-w" in owners["remedy"]


def test_memory_is_no_place_for_checkpoints(run: Run, tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    result = run("doctor", "/dev/shm/mindx-doctor-test", "--json")
    assert any("in memory" in each["text"] for each in findings(json.loads(result.stdout), "directory"))
    assert not os.path.exists("/dev/shm/mindx-doctor-test")


@pytest.mark.parametrize("words", [("--state", "18")])
def test_wrong_usage_is_2(run: Run, tmp_path: Path, words: tuple[str, str]) -> None:
    assert run("doctor", tmp_path, *words).exit_code == 2


def test_a_file_in_place_of_a_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, said in (("x", "is a file"), ("x/ckpt/a", "is a file"), ("link", "is a link to nothing")):
        document = json.loads(run("doctor", tmp_path / path, "--json").stdout)
        (finding,) = findings(document, "directory")
        assert document["worst"] == finding["level"] == "problem" and said in finding["text"], path
