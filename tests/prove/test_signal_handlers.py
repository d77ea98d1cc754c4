from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from mindx_elastic.prove.signal_handlers import handlers_held


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_runs_behind_the_block() -> None:
    done: list[str] = []

    def work() -> None:
        with handlers_held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_each_signal_counts_once_and_an_error_of_the_block_comes_through() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))

    def work() -> None:
        with handlers_held():
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert not heard
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        work()
    assert heard == [signal.SIGTERM]


def test_what_is_started_inside_has_the_usual_actions() -> None:
    code = "import signal; print(signal.getsignal(15) is signal.SIG_DFL, signal.pthread_sigmask(0, []))"
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    with handlers_held():
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "True set()\n"


def test_other_threads_need_nothing() -> None:
    errors: list[BaseException] = []

    def work(inside: Callable[[], None]) -> None:
        try:
            with handlers_held():
                inside()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, args=(lambda: None,))
    thread.start()
    thread.join()
    assert not errors
