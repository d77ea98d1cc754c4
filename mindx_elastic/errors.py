"""Every exception of the package, in one tree.

::

    MindxError
    +-- UsageError (ValueError)              a wrong argument, a call from the wrong thread, a wrong order of calls
    |   +-- DirectoryInUseError               another running job uses the directory
    +-- UntrustedMessageError (ValueError)   a value in the store was not written by a rank of this job
    +-- UnmanagedStateError (RuntimeError)   state of the training that no checkpoint has: a resumed run would differ
    |   +-- ResumeDiffersError                the resumed run makes another step than the stopped one, and is not to
    +-- OddStepError (ArithmeticError)       a step's loss is no number, and the job goes back to the step before
    +-- UnsupportedStateError (TypeError)    a value that a checkpoint cannot hold (sparse tensor, arbitrary object)
    +-- PeerStartError (RuntimeError)        another rank could not start, and why
    +-- CheckpointError
        +-- SaveError (OSError)              a file could not be written; older files are untouched
        +-- ArenaError (OSError)             no snapshots in shared memory: no room, in use, or of another user
        +-- UnsafeDirectoryError (PermissionError)  a directory that others may write to
        +-- UntrustedFileError (PermissionError)    a file that another user has put there
        +-- CorruptCheckpointError (ValueError)     damaged bytes: truncated, flipped, malformed
        +-- ForeignCheckpointError (ValueError)     a sound file that this package did not write
        +-- MismatchError (ValueError)       a good checkpoint that does not fit this model, loader or world size
        +-- NoUsableCheckpointError (FileNotFoundError)  there are checkpoints, none of them can be resumed from

    GracefulExit (SystemExit)                not an error: the job was asked to stop and its state is durable

A message says what happened, to which file, rank, step or tensor, and what to do about it. The same facts are fields.
"""

from __future__ import annotations

import os
from pathlib import Path

from mindx_elastic.core.printable import printable

__all__ = [
    "ArenaError",
    "CheckpointError",
    "CorruptCheckpointError",
    "DirectoryInUseError",
    "ForeignCheckpointError",
    "GracefulExit",
    "MindxError",
    "MismatchError",
    "NoUsableCheckpointError",
    "OddStepError",
    "PeerStartError",
    "ResumeDiffersError",
    "SaveError",
    "UnmanagedStateError",
    "UnsafeDirectoryError",
    "UnsupportedStateError",
    "UntrustedFileError",
    "UntrustedMessageError",
    "UsageError",
]

StrPath = str | os.PathLike[str]


class MindxError(Exception):
    """Base of every error that this package raises on purpose.

    Its text is one line. Control characters from files, ranks or the platform are escaped, for terminals.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(MindxError, ValueError):
    """An argument or a call that cannot work; nothing was started and nothing was written."""


class UntrustedMessageError(MindxError, ValueError):
    """A value in the job's store was not written by its ranks: their keys differ, or another program writes there.

    Raised at the start, before anything is changed.
    """


class UnmanagedStateError(MindxError, RuntimeError):
    """The program has state that its guard does not keep, so that a resumed run would differ without a word.

    Raised when the guard is entered or at a boundary, as soon as it is certain; nothing is saved then, unless `saves`.
    ``Guard(unmanaged="warn")`` makes it a warning.
    """

    saves = False
    """The state of the last boundary is whole (only the loop is at fault), and is saved as at any exception."""


class ResumeDiffersError(UnmanagedStateError):
    """The first step of the resumed run is not the one that the stopped process has made, and the guard was told to end
    the job then (``on_difference="stop"``). Nothing is saved; the checkpoint that it resumed from stays."""


class OddStepError(MindxError, ArithmeticError):
    """The loss or gradient norm of a step is no number, and ``Guard(odd=...)`` was given: the step is made again by the
    next start; or it was, and came out so again, and the job was told to end then."""


class DirectoryInUseError(UsageError):
    """Another running job uses the directory `path`: process `pid` on `host`, `since` a unix time (0, "": unknown).

    Rank 0 sets these fields; the other ranks know the message only.
    """

    def __init__(self, message: str, *, path: StrPath = "", host: str = "", pid: int = 0, since: float = 0.0) -> None:
        super().__init__(message)
        self.path = Path(path)
        self.host, self.pid, self.since = host, pid, since


class UnsupportedStateError(MindxError, TypeError):
    """A value that a checkpoint cannot hold.

    `where` is its place in the state, for example ``optimizer.state.0.exp_avg``.
    """

    def __init__(self, where: str, problem: str) -> None:
        self.where = where
        super().__init__(f"{where}: {problem}")


class PeerStartError(MindxError, RuntimeError):
    """Another rank, `rank`, could not start the training, so no rank can; `cause` is its error as text.

    An error of this package keeps its class on every rank; its message begins with the rank.
    """

    def __init__(self, rank: int, cause: str) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(f"rank {rank} could not start: {cause}")


class CheckpointError(MindxError):
    """Base of all errors of checkpoint files. `path` names the file (None: no single file)."""

    def __init__(self, message: str, *, path: StrPath | None = None) -> None:
        self.path = None if path is None else Path(path)
        super().__init__(message)


class SaveError(CheckpointError, OSError):
    """A checkpoint could not be written. Older files are untouched; training may go on.

    `rank` and `step` say whose state was to be saved; ``__cause__`` holds the original error.
    """

    def __init__(
        self, message: str, *, path: StrPath | None = None, rank: int | None = None, step: int | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.rank = rank
        self.step = step


class ArenaError(CheckpointError, OSError):
    """Shared memory cannot hold snapshots. Training goes on without them."""


class UnsafeDirectoryError(CheckpointError, PermissionError):
    """A directory that other users may write to: any of them could have put a checkpoint there."""


class UntrustedFileError(CheckpointError, PermissionError):
    """A file that another user has put there, or may have changed. It is not loaded. `uid`: its owner."""

    def __init__(self, message: str, *, path: StrPath | None = None, uid: int = -1) -> None:
        super().__init__(message, path=path)
        self.uid = uid


class CorruptCheckpointError(CheckpointError, ValueError):
    """Damaged bytes. `tensor` names the first bad tensor when the header was still readable."""

    def __init__(self, message: str, *, path: StrPath | None = None, tensor: str | None = None) -> None:
        super().__init__(message, path=path)
        self.tensor = tensor


class ForeignCheckpointError(CheckpointError, ValueError):
    """A file that this package did not write (no ``mindx.schema`` in its metadata, or a newer schema)."""


class MismatchError(CheckpointError, ValueError):
    """A sound checkpoint that does not fit the job: changed model, loader or world size."""


class NoUsableCheckpointError(CheckpointError, FileNotFoundError):
    """Checkpoints exist and none can be resumed from. Raised instead of a silent fresh start."""


class GracefulExit(SystemExit):
    """Raised in the training thread once the job's state is durable; leaves the interpreter with `code`.

    A `SystemExit`, so that ``except Exception`` in user code does not swallow it and an uncaught one ends the
    process with the right exit code and no traceback.
    """

    def __init__(self, code: int, *, reason: str, step: int | None, path: StrPath | None) -> None:
        super().__init__(code)
        self.reason = reason
        self.step = step
        self.path = None if path is None else Path(path)
