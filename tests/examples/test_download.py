"""The download against archives made here and `file:` addresses; no network is used."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import download
from dataset import DataError, load_cifar10

FOLDER = "cifar-10-batches-bin"


def make_archive(path: Path, members: dict[str, bytes], *, links: dict[str, str] | None = None) -> str:
    """A tar.gz with `members` and symbolic `links`; returns its MD5."""
    with tarfile.open(path, "w:gz") as tar:
        folder = tarfile.TarInfo(FOLDER)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.fixture
def archive(tmp_path: Path, cifar_directory: Path) -> tuple[str, str]:
    """Address and MD5 of a small archive in the published form."""
    members = {f"{FOLDER}/{path.name}": path.read_bytes() for path in cifar_directory.iterdir()}
    members[f"{FOLDER}/readme.html"] = b"<html>"
    path = tmp_path / "archive.tar.gz"
    return path.as_uri(), make_archive(path, members)


def test_downloads_once_and_leaves_no_temporary_files(tmp_path: Path, archive: tuple[str, str]) -> None:
    url, md5 = archive
    target = tmp_path / "new" / "data"
    assert download.download_cifar10(target, url=url, md5=md5) == target / FOLDER
    assert len(load_cifar10(target).train) == 30
    assert {path.name for path in target.iterdir()} == {FOLDER, ".download.lock"}
    # A second call needs no address at all.
    assert download.download_cifar10(target, url="file:///nowhere", md5=md5) == target / FOLDER


def test_a_wrong_checksum_unpacks_nothing(tmp_path: Path, archive: tuple[str, str]) -> None:
    target = tmp_path / "data"
    with pytest.raises(DataError, match="0123abcd was expected"):
        download.download_cifar10(target, url=archive[0], md5="0123abcd")
    assert {path.name for path in target.iterdir()} == {".download.lock"}


def test_no_network_says_what_to_do(tmp_path: Path) -> None:
    # Port 9 of this machine: refused at once, as a machine without a route would be.
    with pytest.raises(DataError, match=r"cannot download http://127\.0\.0\.1:9/a: .*copy.*--data-url"):
        download.download_cifar10(tmp_path, url="http://127.0.0.1:9/a")
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize(
    "name",
    [
        "../evil.bin",
        "/tmp/evil.bin",
        f"{FOLDER}/a/evil.bin",
        "evil.bin",
    ],
)
def test_a_member_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.tar.gz"
    md5 = make_archive(path, {f"{FOLDER}/data_batch_1.bin": bytes(3073), name: b"evil"})
    with pytest.raises(DataError, match="unexpected member"):
        download.download_cifar10(tmp_path / "data", url=path.as_uri(), md5=md5)
    assert not list(tmp_path.rglob("evil.bin"))
    assert not (tmp_path / "data" / FOLDER).exists()


def test_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.tar.gz"
    md5 = make_archive(path, {}, links={f"{FOLDER}/test_batch.bin": "/etc/hostname"})
    with pytest.raises(DataError, match="unexpected member"):
        download.download_cifar10(tmp_path / "data", url=path.as_uri(), md5=md5)


def test_all_ranks_at_once_download_once(
    tmp_path: Path, archive: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real: Callable[[str, Path, str], None] = download.fetch_archive

    def counted(url: str, target: Path, md5: str) -> None:
        calls.append(url)
        real(url, target, md5)

    monkeypatch.setattr(download, "fetch_archive", counted)
    errors: list[DataError] = []

    def run() -> None:
        try:
            download.download_cifar10(tmp_path / "data", url=archive[0], md5=archive[1])
        except DataError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(calls) == 1
