"""Which alarm becomes of a signal, with an agent and without one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.alarm.peers import PeerWatch, own_identity
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.guard.agent_link import AgentLink
from mindx_elastic.guard.listeners import Listeners
from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL
from tests.guard.stopper_parts import Parts

Make = Callable[..., Parts]


class Link:
    """An agent that is alive or gone, and its next order."""

    agent_fd = -1

    def __init__(self, *, gone_later: bool = False, order: dict[str, Any] | None = None) -> None:
        self.gone_later, self.order = gone_later, order
        self.is_gone = False

    def is_orphan(self) -> bool:
        return self.is_gone

    def orders(self) -> list[dict[str, Any]]:
        return [] if self.order is None else [self.order]


class Listening:
    """A stopper and its listeners, with real signal handlers; no thread runs."""

    def __init__(self, parts: Parts, stack: ExitStack, link: Link | None) -> None:
        self.parts = parts
        self.listeners = Listeners(Settings(), parts.stopper.save.policies, RankInfo())
        peers = PeerWatch(dict(enumerate([own_identity()])), rank=0)
        self.listeners.start(stack, parts.stopper, Exchange(), peers, cast("AgentLink | None", link))
        if link is not None:
            link.is_gone = link.gone_later

    def hear(self, signum: int) -> Alarm | None:
        self.listeners.hear_signal(signum)
        return self.parts.stopper.alarm


@pytest.fixture
def listen(make_parts: Make) -> Iterator[Callable[..., Listening]]:
    with ExitStack() as stack:

        def start(link: Link | None = None, **policy: Any) -> Listening:
            return Listening(make_parts(**policy), stack, link)

        yield start


Listen = Callable[..., Listening]


def test_an_agent_stops_its_workers_whatever_the_policies_say(listen: Listen) -> None:
    heard = listen(Link(), exit_codes={"signal": 9, "request": 9})
    alarm = heard.hear(signal.SIGTERM)
    assert alarm is not None and (alarm.kind, alarm.reason, alarm.exit_code) == ("request", "SIGTERM", 143)


def test_the_kernels_sigterm_after_the_agents_death(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    alarm = listen(Link(gone_later=True), signals=(signal.SIGTERM,)).hear(signal.SIGTERM)
    assert alarm is not None
    assert (alarm.kind, alarm.reason, alarm.exit_code) == ("signal", "the agent of rank 0 is gone", 75)
    assert "the agent of rank 0 is gone; the process must be gone in" in caplog.text


def test_an_order_of_the_agent(listen: Listen) -> None:
    order = {"kind": "fault", "reason": "npu 3 is broken", "exit_code": 75}
    heard = listen(Link(order=order), alarms=frozenset({"fault"}))
    alarm = heard.hear(CONTROL_SIGNAL)
    assert alarm is not None and (alarm.kind, alarm.reason) == ("fault", "npu 3 is broken")
