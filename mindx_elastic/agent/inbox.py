"""The signals that the agent gets.

Handlers only append the number to a list, and the main loop polls `fd`. Where the main thread waits elsewhere (for
other nodes, for a zygote) it looks again and again whether there is one (`check`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from mindx_elastic.core.events import logger
from mindx_elastic.core.wakeup import Wakeup

__all__ = ["SignalInbox", "parse_signals"]

_OF_THE_TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""One of these that is ignored at the start stays ignored: ``nohup`` and ``command &`` in a script mean it. An
ignored SIGTERM comes from a wrapper's own ``trap '' TERM`` and would leave the platform no way to stop the job; it is
taken."""
_TAKEN_BY_TORCH = (*_OF_THE_TERMINAL, signal.SIGTERM)
"""At each start of workers, by versions of torch that know no ``TORCHELASTIC_SIGNALS_TO_HANDLE``."""


def parse_signals(names: str) -> tuple[int, ...]:
    """``SIGTERM,SIGINT`` -> numbers; what does not exist here is left out with a warning, as torchrun does."""
    found = []
    for name in names.split(","):
        try:
            found.append(int(signal.Signals[name.strip()]))
        except KeyError:
            if name.strip():
                logger.warning("--signals-to-handle: there is no signal %s here", name.strip())
    return tuple(found)


class SignalInbox:
    """Main thread only. Use as a context manager; handlers are restored at the end."""

    def __init__(self, signals: Sequence[int], *, last: bool = False) -> None:
        """Of `signals` those of the terminal that are ignored already stay ignored, see `ignored`.

        last: the process ends next. Signals are ignored from then on, for the exit code is settled and must not become
        that of a signal which comes while the interpreter shuts down.
        """
        self._last = last
        self._signals = tuple(signals)
        self.heard: list[int] = []
        """All that came, in order."""
        self.ignored: tuple[int, ...] = ()
        """Those asked for that stay ignored, as they were when the process was started (``nohup``)."""
        self._previous: dict[int, object] = {}
        self._untouched: dict[int, object] = {}

    @property
    def taken(self) -> tuple[int, ...]:
        """The signals that are heard."""
        return tuple(self._previous)

    @property
    def first(self) -> int | None:
        return self.heard[0] if self.heard else None

    def __enter__(self) -> SignalInbox:
        self._wakeup = Wakeup()
        self.fd = self._wakeup.fd
        self._before = signal.set_wakeup_fd(self._wakeup.writer, warn_on_full_buffer=False)
        before = {number: signal.getsignal(number) for number in (*self._signals, *_TAKEN_BY_TORCH)}
        self.ignored = tuple(n for n in self._signals if n in _OF_THE_TERMINAL and before[n] is signal.SIG_IGN)
        self._previous = {number: before[number] for number in self._signals if number not in self.ignored}
        self._untouched = {number: handler for number, handler in before.items() if number not in self._previous}
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            with suppress(TypeError, ValueError, OSError):  # None: not installed from Python
                signal.signal(number, signal.SIG_IGN if self._last else handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._before)
        self._wakeup.close()

    def install(self) -> None:
        """Take the signals (again): torch installs its own handlers each time it starts workers, also for some
        that are not ours to take."""
        for number in self._previous:
            signal.signal(number, self._mark)
        for number, handler in self._untouched.items():
            with suppress(TypeError):  # None: not installed from Python
                signal.signal(number, handler)  # type: ignore[arg-type]

    def drain(self) -> None:
        """Empty the pipe `fd`; what came is in `heard`."""
        self._wakeup.drain()

    def check(self) -> None:
        """Raises SignalException where a signal has come. For waits that `fd` does not end."""
        if self.heard:
            number = signal.Signals(self.heard[0])
            raise SignalException(f"the agent got {number.name}", sigval=number)

    def _mark(self, signum: int, frame: FrameType | None) -> None:
        self.heard.append(signum)
