"""A log line that all ranks of a job have to say comes once: the first rank of a machine that says it claims it.

The claim is a socket with a name in Linux's abstract namespace: taking one is atomic and takes some microseconds, waits
for no rank, disk or store (lines are written by dying processes, too), and goes with the process. Ranks on other
machines, or in other network namespaces, say their lines themselves.
"""

from __future__ import annotations

import errno
import re
import socket
import threading

import xxhash

__all__ = ["LogOnce", "said_once"]

_OF_A_RANK = re.compile(r"rank_\d+| on rank \d+|\d+\.\d+")  # its folder, the one that failed, what each has measured
_SAVED = " saved in "  # which file is durable is each rank's own to say
_MOST = 256


class LogOnce:
    """One in a process, whose claims stay until it ends: another rank may come to the same line later. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._num_claims = 0

    def is_first(self, job: str, text: str) -> bool:
        """Whether this process is to say `text`: no other one of `job` has said it as often."""
        if _SAVED in text:
            return True
        key = f"{job}/{_OF_A_RANK.sub('', text)}"
        with self._lock:
            number = self._counts[key] = self._counts.get(key, 0) + 1
            if self._num_claims >= _MOST:
                return True
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0mindx-line-{xxhash.xxh3_128_hexdigest(f'{number}/{key}'.encode())}")
            except OSError as error:
                claim.close()
                return error.errno != errno.EADDRINUSE
            claim.detach()  # the descriptor stays open
            self._num_claims += 1
            return True


said_once = LogOnce()
