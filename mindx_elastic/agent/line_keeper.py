"""Passes on what a node's ranks write to stderr, and remembers the end of it. `agent.last_lines` starts it::

    python -I -S line_keeper.py READER:WRITER...

one pair of descriptors a local rank: the two ends of its pipe. A line with the number of a pair on stdin is answered on
stdout with one line of JSON, the end of what that rank has written, which is then forgotten.

A process, because it must outlive a killed agent: the ranks save and say so then, and a pipe without a reader would end
them or raise in their programs. The end of stdin is the end of the agent; from then on it lives as long as a writer.
Uses nothing but the standard library.
"""

import json
import os
import select
import signal
import sys
from contextlib import suppress

_MOST_BYTES = 1 << 16


class _Keeper:
    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        self._readers = [reader for reader, _ in pairs]
        self._writers = [writer for _, writer in pairs]
        """Ours: while one is open, a rank that has ended is not an end of the pipe."""
        self._ends = [b""] * len(pairs)
        self._open = set(self._readers)
        self._asked = b""

    def run(self) -> None:
        poll = select.poll()
        for fd in (0, *self._readers):
            poll.register(fd, select.POLLIN)
        while self._open:
            for fd, _ in poll.poll():
                if fd == 0:
                    if not self._answer():
                        poll.unregister(0)
                elif not self._pass_on(self._readers.index(fd)):
                    poll.unregister(fd)

    def _answer(self) -> bool:
        """False: the agent has ended."""
        asked = os.read(0, 4096)
        *lines, self._asked = (self._asked + asked).split(b"\n")
        for line in lines:
            number = int(line)
            while self._pass_on(number, wait=False):
                pass
            text, self._ends[number] = self._ends[number].decode(errors="replace"), b""
            with suppress(OSError):
                os.write(1, json.dumps(text).encode() + b"\n")
        if asked:
            return True
        while self._writers:
            os.close(self._writers.pop())
        return False

    def _pass_on(self, number: int, *, wait: bool = True) -> bool:
        """What is there of one rank; False: nothing will come any more or, without `wait`, nothing is there now."""
        try:
            data = os.read(self._readers[number], _MOST_BYTES)
        except BlockingIOError:
            return wait
        if not data:
            self._open.discard(self._readers[number])
            return False
        self._ends[number] = (self._ends[number] + data)[-_MOST_BYTES:]
        while data:
            try:
                data = data[os.write(2, data) :]
            except OSError:  # it has no reader; the ranks go on
                return True
        return True


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a launcher signals every process of the job
    _Keeper([(int(a), int(b)) for a, b in (word.split(":") for word in sys.argv[1:])]).run()


if __name__ == "__main__":
    _main()
