"""The signals of the agent."""

from __future__ import annotations

import os
import select
import signal

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from mindx_elastic.agent.inbox import SignalInbox

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


def refuse_signal(signum: int, frame: object) -> None:
    raise AssertionError(f"signal {signum} was to be ignored")


def test_a_signal_is_marked_and_wakes_a_poll_and_ends_a_wait_that_asks() -> None:
    before = signal.getsignal(USR1)
    with SignalInbox([USR1, USR2]) as inbox:
        inbox.check()
        signal.signal(USR1, signal.SIG_IGN)  # as torch may, when it starts workers
        inbox.install()
        for number in (USR1, USR2):
            os.kill(os.getpid(), number)
        assert select.select([inbox.fd], [], [], 5)[0]
        inbox.drain()
        assert not select.select([inbox.fd], [], [], 0)[0]
        assert inbox.heard == [USR1, USR2] and inbox.first == USR1
        with pytest.raises(SignalException) as raised:
            inbox.check()
        assert raised.value.sigval == USR1
    assert signal.getsignal(USR1) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_what_nohup_or_a_shell_ignores_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with SignalInbox([number, USR1]) as inbox:
            assert (inbox.ignored, inbox.taken) == ((number,), (USR1,))
            os.kill(os.getpid(), number)
            signal.signal(number, refuse_signal)  # as torch does when it starts workers
            inbox.install()
            os.kill(os.getpid(), number)
            assert inbox.heard == []
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_an_ignored_sigterm_is_taken_all_the_same() -> None:
    """It is how a platform stops a job; whoever started the agent has ignored it for itself."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with SignalInbox([signal.SIGTERM]) as inbox:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inbox.heard == [signal.SIGTERM] and inbox.ignored == ()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
