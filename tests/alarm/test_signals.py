"""Signal handlers: installed, chained, forwarded, and put back whatever happens."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import pytest

from mindx_elastic.alarm.signals import SignalHandlers, hold_signals, release_signals
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.errors import UsageError

WAIT_S = 120.0
ONE, TWO = signal.SIGUSR1, signal.SIGUSR2


class Ears:
    """A watcher that hears the signals of one `SignalHandlers`, as the guard does."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[int] = SimpleQueue()
        self.watcher = Watcher(self._hear)
        self.handlers: SignalHandlers | None = None

    def _hear(self, signum: int) -> None:
        if self.handlers is not None and self.handlers.hear(signum):
            self.heard.put(signum)

    def handle(self, *signals: int) -> SignalHandlers:
        self.handlers = SignalHandlers(signals, self.watcher)
        return self.handlers

    def next(self) -> int:
        return self.heard.get(timeout=WAIT_S)

    def settle(self) -> None:
        done = threading.Event()
        self.watcher.post(done.set)
        assert done.wait(WAIT_S)

    def nothing_more(self) -> bool:
        self.settle()
        with suppress(Empty):
            self.heard.get_nowait()
            return False
        return True


@pytest.fixture
def ears() -> Iterator[Ears]:
    before = {number: signal.getsignal(number) for number in (ONE, TWO, signal.SIGINT)}
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    ears = Ears()
    ears.watcher.start()
    yield ears
    ears.watcher.stop()
    after = signal.set_wakeup_fd(fd)
    found = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert (found, after) == (before, fd), "the test or the code has left handlers behind"


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_a_python_predecessor_is_called_on_leaving_and_put_back_and_an_ignored_signal_stays_ignored(
    ears: Ears,
) -> None:
    """Not before: it may end the process."""
    called: list[int] = []

    def before(signum: int, frame: FrameType | None) -> None:
        called.append(signum)

    original, other = signal.signal(ONE, before), signal.signal(TWO, signal.SIG_IGN)
    try:
        with ears.handle(ONE, TWO):
            assert signal.getsignal(TWO) is signal.SIG_IGN
            send(TWO)
            send(ONE)
            assert ears.next() == ONE and ears.nothing_more()
            assert called == []
        assert called == [ONE]
        assert (signal.getsignal(ONE), signal.getsignal(TWO)) == (before, signal.SIG_IGN)
    finally:
        signal.signal(ONE, original)
        signal.signal(TWO, other)


@pytest.fixture
def program() -> Iterator[tuple[socket.socket, int]]:
    """The end of a wakeup descriptor that the program has installed, and the descriptor."""
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    mine.settimeout(WAIT_S)
    before = signal.set_wakeup_fd(theirs.fileno())
    yield mine, theirs.fileno()
    signal.set_wakeup_fd(before)
    mine.close()
    theirs.close()


@pytest.mark.parametrize(("call", "fail_at"), [("signal", 1), ("signal", 2), ("set_wakeup_fd", 1)])
def test_handlers_are_restored_after_a_failure_half_way(
    ears: Ears, program: tuple[socket.socket, int], monkeypatch: pytest.MonkeyPatch, call: str, fail_at: int
) -> None:
    real, calls = getattr(signal, call), itertools.count(1)

    def fragile(*arguments: Any, **options: Any) -> Any:
        if next(calls) == fail_at:
            raise OSError("injected")
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(signal, call, fragile)
        with pytest.raises(OSError, match="injected"):
            ears.handle(ONE, TWO).__enter__()
    assert signal.getsignal(ONE) is signal.getsignal(TWO) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == program[1]


def test_every_signal_is_forwarded_to_the_wakeup_descriptor_that_was_there(
    ears: Ears, program: tuple[socket.socket, int]
) -> None:
    """asyncio's handlers do nothing; its loop wakes up by the byte alone, for our signals as for the others."""
    mine, fd = program
    original = signal.signal(TWO, lambda signum, frame: None)
    try:
        with ears.handle(ONE):
            send(TWO)
            assert mine.recv(1) == bytes([TWO])
            assert ears.nothing_more(), "TWO is none of ours"
            send(ONE)
            assert ears.next() == ONE
            assert mine.recv(1) == bytes([ONE])
        assert signal.set_wakeup_fd(-1) == fd
    finally:
        signal.signal(TWO, original)


def test_a_predecessor_descriptor_that_is_closed_does_no_harm(ears: Ears) -> None:
    theirs, mine = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    with ears.handle(ONE):
        theirs.close()
        mine.close()
        send(ONE)
        assert ears.next() == ONE
    assert signal.set_wakeup_fd(before) == -1, "it cannot be installed again"


def test_a_signal_that_nobody_heard_is_delivered_again_on_leaving() -> None:
    """The watcher does not run: as if the signal had come in the last microsecond."""
    watcher = Watcher(lambda signum: None)
    with pytest.raises(KeyboardInterrupt), SignalHandlers([signal.SIGINT], watcher):
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    watcher.stop()


def test_what_cannot_be_caught_is_refused_and_another_thread_installs_nothing(ears: Ears) -> None:
    def enter() -> None:
        with ears.handle(ONE):
            found.append(signal.getsignal(ONE))

    found: list[Any] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(WAIT_S)
    assert found == [signal.SIG_DFL]
    for number in (signal.SIGKILL, 999, "SIGTERM"):
        with pytest.raises(UsageError, match="cannot be caught"):
            SignalHandlers([number], ears.watcher)  # type: ignore[list-item]


def test_after_a_graceful_stop_a_late_signal_does_nothing_until_the_deadline(ears: Ears) -> None:
    """A launcher signals the rest of the job once the first process is gone; the exit code must stay."""
    with ears.handle(ONE, signal.SIGINT) as handlers:
        handlers.linger(time.monotonic() + 1000)
    send(ONE)
    send(signal.SIGINT)
    with ears.handle(ONE, signal.SIGINT):  # another guard in the same process
        send(ONE)
        assert ears.next() == ONE
    assert signal.getsignal(ONE) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_the_deadline_the_old_action_is_back(ears: Ears) -> None:
    with ears.handle(signal.SIGINT) as handlers:
        handlers.linger(time.monotonic() - 1)
    handlers._ignore_at_exit()  # as the interpreter's end does
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_its_own_signals(ears: Ears) -> None:
    with ears.handle(ONE):
        pid = os.fork()
        if pid == 0:
            send(ONE)  # the default action, as before the guard
            os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -ONE
        assert ears.nothing_more(), "the child's signal has alarmed the parent"
        send(ONE)
        assert ears.next() == ONE, "the parent has become deaf"


# --- signals that come while no guard is open -------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[int]]:
    yield []
    release_signals()


def test_what_comes_between_two_guards_is_held_for_the_second(ears: Ears, told: list[int]) -> None:
    """Also what the first one has not heard any more."""
    before = signal.getsignal(ONE)
    with ears.handle(ONE, TWO) as first:
        first.hold([ONE], told.append)
        first.hear = lambda signum: False  # type: ignore[method-assign]
        signal.raise_signal(ONE)
        ears.settle()
    assert signal.getsignal(TWO) is signal.SIG_DFL
    signal.raise_signal(ONE)
    assert told == [ONE]
    with ears.handle(ONE, TWO) as second:
        assert second.held == [ONE, ONE] and ears.nothing_more()
        signal.raise_signal(ONE)
        assert ears.next() == ONE and told == [ONE]
    assert signal.getsignal(ONE) is before


@pytest.mark.parametrize("follows", [True, False])
def test_a_handler_of_the_program_is_called_for_what_is_held(ears: Ears, told: list[int], follows: bool) -> None:
    """Once the guard that follows is left, or where none does."""
    called: list[int] = []
    before = signal.signal(ONE, lambda signum, frame: called.append(signum))
    try:
        with ears.handle(ONE) as first:
            first.hold([ONE], told.append)
        signal.raise_signal(ONE)
        assert (called, told) == ([], [ONE])
        if follows:
            with ears.handle(ONE) as second:
                assert second.held == [ONE] and called == []
        else:
            release_signals()
        assert called == [ONE]
    finally:
        signal.signal(ONE, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_new_process_holds_what_would_end_it_and_its_forked_children_do_not(ears: Ears, told: list[int]) -> None:
    ignored = signal.signal(TWO, signal.SIG_IGN)
    try:
        hold_signals([ONE, TWO])
        assert signal.getsignal(TWO) is signal.SIG_IGN
        signal.raise_signal(ONE)
        pid = os.fork()
        if pid == 0:
            os._exit(int(signal.getsignal(ONE) is not signal.SIG_DFL))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with ears.handle(ONE, TWO) as handlers:
            assert handlers.held == [ONE]
        assert signal.getsignal(ONE) is signal.SIG_DFL
    finally:
        signal.signal(TWO, ignored)
