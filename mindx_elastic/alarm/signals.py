"""Installs the signal handlers, chains the ones that were there, and restores them.

The handler itself only counts the signal; the number goes through the wakeup descriptor to the watcher thread (see
`watcher`). Without a Python-level handler C code would apply the default action and end the process.

A handler that was there before is called once the state is safe, when these handlers are left: it may end the process.
The usual one cleans up, puts SIG_DFL back and sends the signal again. The program's handlers of other signals that ask
for an end (`REQUESTS`) may do the same, or raise, so none of them is called in the middle of an update.

Where a guard is left to be entered again in a moment, or will be entered for the first time by a process that takes
another one's place, signals are held meanwhile: `HeldSignals` notes them, and the next `SignalHandlers` has them.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core import first_process
from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError

__all__ = ["REQUESTS", "HeldSignals", "SignalHandlers", "hold_signals", "release_signals"]

REQUESTS = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU)
"""With these, launchers, terminals and schedulers ask a process to end. Others (SIGALRM, SIGCHLD) have other uses."""
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_DEFAULTS = (None, signal.SIG_DFL, signal.default_int_handler, first_process.leave)
_active: SignalHandlers | None = None
_holding: HeldSignals | None = None


class HeldSignals:
    """Notes the signals of a process that has no open guard now and will have one soon."""

    def __init__(self, tell: Callable[[int], None] = lambda signum: None) -> None:
        """`tell` is called for each, in the signal handler."""
        self.noted: deque[int] = deque()
        self.before: dict[int, Any] = {}
        """The handlers that this object stands in for."""
        self._tell = tell

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.noted.append(signum)
        self._tell(signum)


def _is_function(handler: Any) -> bool:
    """Whether it is the program's own: not Python's, which raises KeyboardInterrupt, nor what stands for the default
    action in process 1."""
    return callable(handler) and handler not in _DEFAULTS


def hold_signals(signals: Collection[int]) -> None:
    """Hold these signals until a guard is entered, as far as they would end the process. Main thread."""
    global _holding
    held = HeldSignals()
    for number in signals:
        before = signal.getsignal(number)
        if before is signal.SIG_DFL:
            held.before[number] = before
            signal.signal(number, held.note)
    _holding = held


def release_signals() -> None:
    """Signals that are held have the action again that they had before: no guard is entered. Main thread."""
    global _holding
    held, _holding = _holding, None
    if held is None:
        return
    for number, before in held.before.items():
        if signal.getsignal(number) == held.note:
            signal.signal(number, before)
            if number in held.noted and _is_function(before):
                signal.raise_signal(number)


class SignalHandlers:
    """Context manager: while it is open, `signals` go to `watcher` and do not end the process.

    Enter and leave it in the main thread; in another one it hears nothing. A signal that was ignored when it is entered
    (``nohup``; a background job of a shell ignores SIGINT) stays ignored. Predecessors that are Python functions are
    called on leaving, except Python's own KeyboardInterrupt handler. Restored on leaving, also after a failure
    half-way.
    """

    def __init__(
        self,
        signals: Sequence[int],
        watcher: Watcher,
        *,
        is_updating: Callable[[], bool] = lambda: False,
        patience_s: float = 0.0,
    ) -> None:
        """`is_updating`: whether the state is between two boundaries now; asked in a signal handler. `patience_s`: how
        long a handler of the program may wait for `call_postponed`."""
        valid = signal.valid_signals()  # 0.1 ms
        for number in signals:
            if number in _UNCATCHABLE or number not in valid:
                raise UsageError(f"signal {number} cannot be caught; choose another, for example signal.SIGTERM")
        self.signals = tuple(dict.fromkeys(signals))
        self._watcher = watcher
        self._previous: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}  # the program's handlers of other signals
        self._newer: dict[int, Any] = {}  # what the program has put in the place of these handlers meanwhile
        self._is_updating, self._patience_s = is_updating, patience_s
        self.postponed: deque[int] = deque()
        """Other signals that have come in the middle of an update: see `call_postponed`."""
        self._previous_fd = -1
        self._installed = False
        self._lock = threading.Lock()  # never taken in the handler
        self._marked: deque[int] = deque()
        self._heard = 0
        self._closed = False
        self._linger_until: float | None = None
        self._lingering: dict[int, Any] = {}
        self._held: HeldSignals | None = None
        self.held: list[int] = []
        """The signals that were held until these handlers were there."""

    def __enter__(self) -> SignalHandlers:
        global _active, _holding
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            self._previous_fd = signal.set_wakeup_fd(self._watcher.wakeup_fd, warn_on_full_buffer=False)
            self._installed = True
            noted: Collection[int] = ()
            for number in self.signals:
                before = signal.getsignal(number)
                earlier = getattr(before, "__self__", None)
                if isinstance(earlier, SignalHandlers):
                    before = earlier._lingering.get(number, signal.SIG_DFL)
                elif isinstance(earlier, HeldSignals):
                    before = earlier.before[number]
                    noted = earlier.noted
                if before is signal.SIG_IGN:
                    continue
                self._previous[number] = before
                signal.signal(number, self._handle)
            for number in REQUESTS:
                before = signal.getsignal(number)
                if number not in self.signals and _is_function(before):
                    self._theirs[number] = before
                    signal.signal(number, self._handle_theirs)
            self.held, _holding = list(noted), None
            self._marked.extend(noted)
            self._heard += len(self._marked)
        except BaseException:
            self._restore()
            raise
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
        # The last signals may have reached the handler and not yet the watcher: they are delivered again. So is what a
        # handler of the program has not been called for yet.
        unheard = set(list(self._marked)[self._heard :])
        heard = dict.fromkeys(self._marked)
        newer = {n: handler for n, handler in self._newer.items() if n in heard and n not in unheard}
        again = [n for n in heard if n in unheard or n in newer or _is_function(self._before(n))]
        if self._held is not None:
            self._held.noted.extend(n for n in again if n in self._held.before)
            again = [n for n in again if n not in self._held.before]
        again += self.postponed
        has_stopped = self._linger_until is not None
        self._restore()
        for signum in again:
            if has_stopped and _is_function(before := newer.get(signum) or signal.getsignal(signum)):
                self._call_after_stop(before, signum)
            else:
                signal.raise_signal(signum)

    def _call_after_stop(self, handler: Any, signum: int) -> None:
        """The state is durable. What the handler raises, and the action that it puts back, would only change the exit
        code of the stop."""
        if getattr(handler, "__self__", None) is self:
            return
        try:
            with _no_default_action(signum):
                handler(signum, None)
        except BaseException as error:
            if not isinstance(error, SystemExit):
                what = f"{type(error).__name__}: {error}"
                logger.warning("the program's handler of signal %d, called after the save: %s", signum, what)
        self._lingering[signum] = signal.SIG_DFL
        signal.signal(signum, self._late)

    def take_over(self) -> None:
        """Main thread, at some boundaries: a function that the program has installed in the place of these handlers is
        called after the save, as one from before."""
        for number in self._previous:
            now = signal.getsignal(number)
            if getattr(now, "__self__", None) is not self and _is_function(now):
                self._newer[number] = now
                signal.signal(number, self._handle)

    def call_postponed(self) -> None:
        """Main thread, at a boundary: call the program's handlers for what has come in the middle of the update. They
        may raise, or end the process."""
        while self.postponed:
            signum = self.postponed.popleft()
            self._theirs[signum](signum, None)

    def hold(self, signals: Collection[int], tell: Callable[[int], None]) -> None:
        """Before the handlers are restored: hold these signals from then on, until the next guard of this process is
        entered, which it will be in a moment. `tell` is called for each, in the signal handler."""
        global _holding
        held = self._held = _holding = HeldSignals(tell)
        for number in self._previous.keys() & set(signals):
            held.before[number] = self._previous[number]
            self._previous[number] = held.note

    def linger(self, until: float) -> None:
        """Make the signals do nothing until `until` (`time.monotonic` seconds) once the handlers are restored.

        For a process that leaves after a graceful stop: launchers signal the rest of the job once the first process
        is gone, and a default action in the middle of the interpreter's end would turn exit code 143 into -15. After
        `until` the default action is back.
        """
        if self._linger_until is None:
            atexit.register(self._ignore_at_exit)
        self._linger_until = until

    def end_linger(self, signum: int) -> None:
        """`signum` has the action again that it had before."""
        before = self._lingering.pop(signum, None)
        signal.signal(signum, signal.SIG_DFL if before is None else before)

    def _ignore_at_exit(self) -> None:
        """The interpreter removes Python handlers long before the process is gone; SIG_IGN stays."""
        if self._linger_until is not None and time.monotonic() < self._linger_until:
            for number in self._lingering:
                if getattr(signal.getsignal(number), "__self__", None) is self:
                    signal.signal(number, signal.SIG_IGN)

    def forward(self, signum: int) -> None:
        """Pass a signal number on to the wakeup descriptor that was installed before ours (asyncio's, for example)."""
        if self._previous_fd >= 0:
            with suppress(OSError):  # its owner is gone; or the buffer is full, and it is awake anyway
                os.write(self._previous_fd, bytes([signum]))

    def hear(self, signum: int) -> bool:
        """Watcher thread: note that `signum` has arrived. Returns whether this object handles it."""
        with self._lock:
            if self._closed:
                return False
            ours = signum in self._previous
            self._heard += ours
        self.forward(signum)  # ours too: asyncio's handler does nothing, its loop waits for the byte
        if signum in self._theirs:
            self._watcher.call_at(time.monotonic() + self._patience_s, self._urge)
        return ours

    def _urge(self) -> None:
        """Watcher thread: the update does not end, so what is postponed is called in the midst of it."""
        if self.postponed and not self._closed:
            self._is_updating = lambda: False
            signal.pthread_kill(threading.main_thread().ident or 0, self.postponed.popleft())

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._marked.append(signum)

    def _handle_theirs(self, signum: int, frame: FrameType | None) -> None:
        if self._is_updating():
            self.postponed.append(signum)
        else:
            self._theirs[signum](signum, frame)

    def _before(self, signum: int) -> Any:
        """The handler that was there, through one that holds the signal for the next guard."""
        before = self._previous.get(signum)
        return self._held.before[signum] if self._held is not None and before == self._held.note else before

    def _late(self, signum: int, frame: FrameType | None) -> None:
        if self._linger_until is None or time.monotonic() > self._linger_until:
            self.end_linger(signum)
            signal.raise_signal(signum)

    def _restore(self) -> None:
        global _active
        if _active is self:
            _active = None
        for number, before in {**self._previous, **self._theirs}.items():
            lingers = before in _DEFAULTS and self._linger_until is not None
            if lingers:
                self._lingering[number] = before
            # None: the predecessor was installed by C code and cannot be restored from Python.
            signal.signal(number, self._late if lingers else signal.SIG_DFL if before is None else before)
        self._previous.clear()
        self._theirs.clear()
        if self._installed:
            try:
                signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
            except (OSError, ValueError):  # its owner has closed it meanwhile
                signal.set_wakeup_fd(-1)
            self._installed = False
        self._previous_fd = -1


@contextmanager
def _no_default_action(signum: int) -> Iterator[None]:
    """Inside, putting SIG_DFL back for `signum` ignores it: the usual handler then sends the signal to its own process
    again, which would turn exit code 143 into -15."""
    real = signal.signal

    def ignore(signalnum: int, handler: Any) -> Any:
        return real(signalnum, signal.SIG_IGN if (signalnum, handler) == (signum, signal.SIG_DFL) else handler)

    signal.signal = ignore
    try:
        yield
    finally:
        signal.signal = real


def _after_fork_in_child() -> None:
    """A forked child (a loader worker, a pool) shares the wakeup socket: its signals would alarm the parent."""
    if _active is not None:
        _active._restore()
    release_signals()


os.register_at_fork(after_in_child=_after_fork_in_child)
