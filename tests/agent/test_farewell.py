"""What agents tell each other after the training."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from mindx_elastic.agent import farewell
from mindx_elastic.agent.farewell import Farewell


def test_what_one_tells_all_hear() -> None:
    store = HashStore()
    one, two = Farewell(store, world_size=4), Farewell(store, world_size=4)
    assert one.heard() == two.heard() == []
    one.tell([3, 1])
    assert one.heard() == two.heard() == [3, 1]


@pytest.mark.parametrize("text", ["", "{", "[4]", "[-1]", "[true]", '["1"]', "{}", "7", "[" * 10_000, "\0"])
def test_nonsense_is_nothing(text: str) -> None:
    store = HashStore()
    store.set("mindx/ended_after_training", text)
    assert Farewell(store, world_size=4).heard() == []


def test_a_store_that_fails_or_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "_ANSWER_S", 0.1)
    over = threading.Event()

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset by peer")

        def set(self, key: str, value: str) -> None:
            over.wait(30)

    gone = Farewell(Gone(), world_size=2)
    gone.tell([1])
    assert gone.heard() == []
    over.set()
