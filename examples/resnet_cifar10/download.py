"""Fetches CIFAR-10's binary version: checksum, progress bar, safe unpacking, callable from every rank at once."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import itertools
import os
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dataset import DataError, find_batches, training_files

__all__ = ["ARCHIVE_MD5", "ARCHIVE_URL", "download_cifar10", "extract_batches", "fetch_archive"]

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
# Published on the data set's home page. MD5 is what its authors give; it finds a torn or mixed-up download.
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
LARGEST_MEMBER = 64 << 20  # bytes; the real files have 30.73 MB each
BLOCK = 1 << 20
TIMEOUT_S = 30.0


def download_cifar10(directory: Path, *, url: str = ARCHIVE_URL, md5: str = ARCHIVE_MD5) -> Path:
    """Make sure that `directory` holds CIFAR-10 in its binary layout; returns the folder of the batches.

    Does nothing when the batches are there already. Every rank may call it: one downloads under a file lock,
    the others wait and find the work done. Raises `DataError` when the archive cannot be fetched, is not the
    published one, or the directory cannot be written.
    """
    if directory.is_dir() and has_cifar10(directory):
        return find_batches(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".download.lock"):
            if not has_cifar10(directory):
                archive = directory / "cifar-10-binary.tar.gz.part"
                try:
                    fetch_archive(url, archive, md5)
                    extract_batches(archive, directory)
                finally:
                    archive.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot put CIFAR-10 into {directory}: {error.strerror or error}") from error
    return find_batches(directory)


def has_cifar10(directory: Path) -> bool:
    folder = find_batches(directory)
    return bool(training_files(folder)) and (folder / "test_batch.bin").is_file()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go by the kernel when the process dies, so never stale
        yield


def fetch_archive(url: str, target: Path, md5: str) -> None:
    """Download `url` to `target` with a progress bar on stderr and compare its MD5. Raises `DataError`."""
    digest = hashlib.md5(usedforsecurity=False)
    columns = (
        TextColumn("CIFAR-10"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    blocks = _blocks(url)
    first = list(itertools.islice(blocks, 1))  # an address that does not answer shows its error and no empty bar
    with open(target, "wb") as file, Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("download", total=None)
        for block, total in itertools.chain(first, blocks):
            digest.update(block)
            file.write(block)
            progress.update(task, advance=len(block), total=total)
    if digest.hexdigest() != md5:
        raise DataError(
            f"{url} has MD5 {digest.hexdigest()}, {md5} was expected: the download was cut off or it is "
            "another file. Nothing was unpacked; try again."
        )


def _blocks(url: str) -> Iterator[tuple[bytes, int | None]]:
    """The bytes of `url`, each block with the announced size. Network trouble becomes `DataError`."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            while block := response.read(BLOCK):
                yield block, total
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise DataError(
            f"cannot download {url}: {getattr(error, 'reason', None) or error}. Without a network: fetch and "
            f"unpack the archive elsewhere, copy its {FOLDER} folder here and name it with --data-url; or "
            "leave out both --data-url and --download to train on scikit-learn's digits."
        ) from error


def extract_batches(archive: Path, directory: Path) -> None:
    """Unpack the batches of `archive` into ``directory/cifar-10-batches-bin``, or nothing if it is not sound.

    Only plain files with a plain name directly inside the archive's folder are taken, each written under that
    name alone: a member cannot choose a path, a link or a mode. Raises `DataError` for anything else.
    """
    staging = directory / f"{FOLDER}.part"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if not member.isdir():
                    _extract_member(tar, member, staging)
        final = directory / FOLDER
        final.mkdir(exist_ok=True)
        # test_batch.bin comes last: once it is there, everything is, also for a rank that looks without the
        # lock.
        for path in sorted(staging.iterdir(), key=lambda path: (path.name == "test_batch.bin", path.name)):
            os.replace(path, final / path.name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is not a sound tar.gz archive: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo, staging: Path) -> None:
    path = PurePosixPath(member.name)
    if len(path.parts) != 2 or path.parts[0] != FOLDER or path.name in ("..", ".") or not member.isfile():
        raise DataError(f"unexpected member {member.name!r} in the archive; nothing was unpacked")
    if member.size > LARGEST_MEMBER:
        raise DataError(f"member {member.name!r} has {member.size} bytes, more than any CIFAR-10 file")
    source = tar.extractfile(member)
    assert source is not None  # isfile() was checked
    with source, open(staging / path.name, "xb") as file:
        shutil.copyfileobj(source, file, BLOCK)
