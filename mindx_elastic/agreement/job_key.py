"""Finds the key of the job: a secret that all ranks have and the store does not.

In this order:

1. ``MINDX_JOB_KEY``, or the file that ``MINDX_JOB_KEY_FILE`` names; `mindx-elastic run` sets the latter by itself in a
   job of one node.
2. All ranks on one node, according to the launcher's environment (torchrun): a random key in a private file of this
   user in the machine's temporary folder, which the first rank that needs it makes. It is for all jobs: what tells
   jobs and starts apart is the session of their messages (`sealed`).
3. Several nodes, or an unknown number: there is no key.

Rejected: a key in the store, which it has to protect; a key in the checkpoint directory (only the store can tell
whether all nodes see the same directory, and checkpoints are copied elsewhere, which a secret must not be).
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from mindx_elastic.config import KeySettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import open_regular
from mindx_elastic.errors import UsageError

__all__ = ["find_key", "read_key_file", "write_key_file"]

_MAX_BYTES = 1 << 16
_LEAST_CHARACTERS = 16


def find_key(settings: KeySettings, world_size: int) -> bytes | None:
    """Return the key; None: there is none.

    Raises UsageError for a key or a file that cannot be used, and where another user has a file of the private file's
    name.
    """
    if settings.text:
        return _check(settings.text, "environment variable MINDX_JOB_KEY")
    if settings.file is not None:
        return read_key_file(settings.file, "environment variable MINDX_JOB_KEY_FILE")
    if settings.local_world_size != world_size:
        return None
    path = Path(tempfile.gettempdir()) / f"mindx-elastic-{os.geteuid()}.key"
    try:
        return _share(path)
    except OSError as error:
        logger.warning(
            "%s: no private file for the key can be made there (%s), so what the ranks tell each other is not "
            "sealed; set MINDX_JOB_KEY or MINDX_JOB_KEY_FILE",
            path.parent,
            error.strerror or error,
        )
        return None


def read_key_file(path: Path, what: str = "") -> bytes:
    """Read the key from a private file of the user. `what`: the setting that names the file; empty: it is the one in
    the temporary folder, where others may put theirs. Raises UsageError."""
    named = f"{what}={path}" if what else f"{path} (without MINDX_JOB_KEY_FILE)"
    remedy = "remove it, or set MINDX_JOB_KEY"
    if what:
        remedy = "give a file that only its owner can read (chmod 600), the same on every node"
    try:
        with open(open_regular(path, follow_link=bool(what)), "rb") as file:
            status, content = os.fstat(file.fileno()), file.read(_MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{named} cannot be read: {error.strerror}; {remedy}") from error
    # Readable for the group: secrets that Kubernetes mounts for a pod with fsGroup.
    forbidden, owners = (0o027, (os.geteuid(), 0)) if what else (0o077, (os.geteuid(),))
    if status.st_mode & forbidden or status.st_uid not in owners:
        raise UsageError(
            f"{named} (mode {stat.S_IMODE(status.st_mode):o}, user {status.st_uid}) could be read or changed by "
            f"others; {remedy}"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.hex()
    return _check(text.strip(), named)


def write_key_file(path: Path) -> None:
    """Put a new random key into the private file `path`, which must not exist. Raises OSError."""
    with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")


def _check(text: str, what: str) -> bytes:
    text = text.strip()
    if len(text) < _LEAST_CHARACTERS:
        raise UsageError(
            f"{what}: a key of {len(text)} characters can be guessed; give at least {_LEAST_CHARACTERS} random ones, "
            "for example 32 hex digits of openssl rand -hex 16"
        )
    return text.encode()


def _share(path: Path) -> bytes:
    """Read the key in `path`; the first process to come creates it, atomically. Raises OSError, UsageError."""
    if not os.path.lexists(path):
        fd, temp = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 600
        try:
            with open(fd, "w") as file:
                file.write(f"{secrets.token_hex(32)}\n")
                file.flush()
                os.fsync(fd)  # or a power cut leaves an empty file, which stops each later job of this user
            with suppress(FileExistsError):
                os.link(temp, path)
        finally:
            os.unlink(temp)
    return read_key_file(path)
