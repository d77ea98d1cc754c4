"""The last lines that a failed rank wrote to stderr, in ``RUN_DIR/last_lines/rank_N.txt``: for `mindx-elastic logs`,
and for the exception of a program that had no guard yet.

The ranks write into pipes; `line_keeper` passes on at once what comes, and remembers the end. Where the user has stderr
written to files (``--redirects``, ``--tee``), those are read.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from mindx_elastic.agent import line_keeper
from mindx_elastic.agent.history import last_lines_path
from mindx_elastic.core.events import logger

__all__ = ["LastLines", "exception_in"]

_MOST_LINES = 200
_MOST_BYTES = 1 << 16
_ANSWER_S = 2.0
_TRACEBACK = "Traceback (most recent call last):"
_OF_RANK = re.compile(r"^\[rank\d+\]: ?")


def exception_in(text: str) -> str:
    """The line that names the exception of the last traceback in `text`; empty: there is none. It may be of another
    thread than the main one, or have been handled: it is what was said last. With a process group torch puts the rank
    in front of each line."""
    _, found, rest = text.rpartition(_TRACEBACK)
    lines = (_OF_RANK.sub("", line) for line in rest.splitlines()[1:]) if found else ()
    return next((line.strip() for line in lines if re.match(r"[A-Za-z_]", line)), "")


class LastLines:
    """One an agent. Main thread."""

    def __init__(self, folder: Path, run_dir: Path, num_ranks: int) -> None:
        """folder: the agent's own, for the pipes. num_ranks: of this node. Where pipes cannot be had the ranks write to
        the agent's stderr as if this was not there."""
        self._run_dir = run_dir
        self._paths = [folder / f"stderr_{local}" for local in range(num_ranks)]
        self._keeper: subprocess.Popen[bytes] | None = None
        self._begin()

    def _begin(self) -> None:
        try:
            with ExitStack() as stack:
                self._start(stack)
        except OSError as error:
            logger.info("the last lines of failed ranks are not kept: %s", error)

    def _start(self, stack: ExitStack) -> None:
        pairs = []
        for path in self._paths:
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            for flags in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY):
                fd = os.open(path, flags | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                pairs.append(fd)
        words = [f"{reader}:{writer}" for reader, writer in zip(pairs[::2], pairs[1::2], strict=True)]
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(line_keeper.__file__).resolve()), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pairs,
            start_new_session=True,
        )

    def specs(self, inner: LogsSpecs) -> LogsSpecs:
        """`inner`, where what would go to the agent's stderr goes through here."""
        return _Specs(inner, self)

    def send_here(self, dest: LogsDest) -> None:
        """An attempt begins with these outputs."""
        if self._keeper is not None and not all(path.is_fifo() for path in self._paths):  # somebody has removed them
            self.finish()
            self._begin()
        if self._keeper is None or self._keeper.poll() is not None:  # opening a pipe without a reader would block
            return
        for local, path in enumerate(self._paths):
            self._take(local)
            if local in dest.stderrs and not dest.stderrs[local]:
                dest.stderrs[local] = str(path)

    def keep(self, rank: int, local: int, stderr: str, how: str) -> str:
        """Write the file of a rank that has failed, and return its lines. `stderr`: where the rank wrote; empty: to the
        agent's own, of which nothing is known. `how`: it has ended, for the first line."""
        text = self._take(local) if stderr == str(self._paths[local]) else _end_of(stderr)
        # A progress bar draws itself over and over in one line.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")][-_MOST_LINES:]
        if any(lines):
            head = f"# rank {rank}: {how}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
            path = last_lines_path(self._run_dir, rank)
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                path.write_text("\n".join([head, *lines, ""]), encoding="utf-8", errors="backslashreplace")
        return "\n".join(lines)

    def _take(self, local: int) -> str:
        keeper = self._keeper
        if keeper is None or keeper.stdin is None or keeper.stdout is None:
            return ""
        try:
            os.write(keeper.stdin.fileno(), b"%d\n" % local)
            answer = b""
            while not answer.endswith(b"\n"):
                if not select.select([keeper.stdout], [], [], _ANSWER_S)[0]:
                    raise OSError("no answer")
                data = os.read(keeper.stdout.fileno(), 1 << 20)
                if not data:
                    raise OSError("it has ended")
                answer += data
            return str(json.loads(answer))
        except (OSError, ValueError) as error:
            logger.debug("the keeper of last lines: %s", error)
            self.close()
            return ""

    def close(self) -> subprocess.Popen[bytes] | None:
        """From now on the keeper lives as long as a rank can write; it is returned."""
        keeper, self._keeper = self._keeper, None
        for pipe in (keeper.stdin, keeper.stdout) if keeper is not None else ():
            if pipe is not None:
                pipe.close()
        return keeper

    def finish(self) -> subprocess.Popen[bytes] | None:
        """All that the ranks have written is passed on; then `close`."""
        for local in range(len(self._paths)):
            self._take(local)
        return self.close()


class _Specs(LogsSpecs):
    def __init__(self, inner: LogsSpecs, lines: LastLines) -> None:
        self._inner, self._lines = inner, lines

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        dest = self._inner.reify(envs)
        self._lines.send_here(dest)
        return dest

    @property
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)


def _end_of(path: str) -> str:
    with suppress(OSError, ValueError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES).decode(errors="replace")
    return ""
