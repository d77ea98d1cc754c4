"""Asking the rendezvous who is there."""

from __future__ import annotations

import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.agent.membership import Membership
from tests.harness import wait_until


class Handler:
    """Answers as told."""

    def __init__(self) -> None:
        self.waiting = 0
        self.error: Exception | None = None
        self.participants = ["a", "b"]
        self.asked = 0

    @property
    def _state_holder(self) -> Any:
        return SimpleNamespace(state=SimpleNamespace(participants=self.participants))

    def num_nodes_waiting(self) -> int:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.waiting


@pytest.fixture
def handler() -> Handler:
    return Handler()


def start(handler: Handler, interval_s: float = 0.01) -> Membership:
    return Membership(handler, num_nodes=2, interval_s=interval_s).start()  # type: ignore[arg-type]


def test_a_node_that_waits_wakes_the_main_thread(handler: Handler) -> None:
    membership = start(handler)
    wait_until(lambda: handler.asked > 1, "questions")
    assert (membership.num_waiting, membership.lost) == (0, "")
    handler.waiting = 1
    assert select.select([membership.fd], [], [], 20)[0]
    wait_until(lambda: membership.num_waiting == 1, "answer")
    membership.stop()


def test_a_node_that_gives_no_sign_is_lost(handler: Handler) -> None:
    membership = start(handler)
    handler.participants = ["a"]
    wait_until(lambda: bool(membership.lost), "loss")
    assert membership.lost == "only 1 of 2 nodes give a sign of life"
    membership.stop()


def test_a_node_that_only_meets_anew_is_not_lost(handler: Handler) -> None:
    handler.participants, handler.waiting = ["a"], 1
    membership = start(handler)
    wait_until(lambda: membership.num_waiting == 1, "answer")
    assert not membership.lost
    membership.stop()


def test_a_store_that_is_gone(handler: Handler) -> None:
    handler.error = RuntimeError("connection reset")
    membership = start(handler)
    assert select.select([membership.fd], [], [], 20)[0]
    wait_until(lambda: bool(membership.lost), "loss")
    assert "RuntimeError" in membership.lost
    assert membership.ask() == 0, "at once"
    membership.stop()


def test_ask_gets_a_fresh_answer(handler: Handler) -> None:
    membership = start(handler, interval_s=60)
    wait_until(lambda: handler.asked == 1, "first question")
    handler.waiting = 3
    assert membership.ask() == 3
    membership.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "mindx-membership"]
