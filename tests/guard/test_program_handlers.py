"""Handlers that a program, or a library that it uses, has installed before the guard; and what it leaves running."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic import Guard
from mindx_elastic.persist.format import read_header
from tests.fork_server import clean_environment
from tests.guarded import no_traces, plain_environment
from tests.watchdog import finish


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


PROGRAM = """
import atexit, concurrent.futures, os, pathlib, signal, sys, threading, time
import torch
import mindx_elastic as mx

what, directory = sys.argv[1:]
def cleanup(signum, frame):  # the usual idiom
    print("SAVED", len(list(pathlib.Path(directory).glob("*.safetensors"))), flush=True)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
for_ever = threading.Event().wait
if what == "handler":
    signal.signal(signal.SIGTERM, cleanup)
elif what == "interrupt":
    def interrupt(signum, frame):
        raise KeyboardInterrupt("from the program")
    signal.signal(signal.SIGTERM, interrupt)
elif what == "thread":
    threading.Thread(target=for_ever).start()
elif what == "atexit":
    atexit.register(for_ever)
elif what == "pool":
    concurrent.futures.ThreadPoolExecutor(1).submit(for_ever)
model = torch.nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters())
guard = mx.Guard(model=model, optimizer=opt, directory=directory)
with guard:
    for step in guard.steps(12):
        opt.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        if what == "inside" and guard.step == 2:
            signal.signal(signal.SIGTERM, cleanup)
        if guard.step == 5:
            os.kill(os.getpid(), signal.SIGHUP if what == "terminal" else signal.SIGTERM)
            guard.stopper.step_gate.wait_for_limit(60)
        guard.step_end()
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("handler", 143, "SAVED 1"),
        ("inside", 143, "SAVED 1"),
        ("interrupt", 143, "KeyboardInterrupt: from the program"),
        ("terminal", 129, "SIGHUP heard"),
        ("thread", 143, "'Thread-1 (wait)', no daemon, still runs"),
        pytest.param("pool", 143, "no daemon, still runs", marks=pytest.mark.slow),
        pytest.param("atexit", 143, "atexit code", marks=pytest.mark.slow),
    ],
)
def test_a_stop_is_saved_and_leaves_in_time_with_its_own_code(tmp_path: Path, what: str, code: int, said: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**clean_environment(), "MINDX_GRACE_S": "2" if "code" in said or "daemon" in said else "60"}
    done = finish([sys.executable, tmp_path / "program.py", what, tmp_path / "ckpt"], env=env, fresh=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    (saved,) = (tmp_path / "ckpt").glob("*_breakpoint.safetensors")
    assert read_header(saved).info.step == 6


class Requeued(SystemExit):
    """As submitit leaves, once Slurm has queued the job again."""


def train(directory: Path, at: Any, **options: Any) -> Guard:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Guard(model=model, optimizer=optimizer, directory=directory, **options)
    with guard:
        at(guard, optimizer)
        for _ in guard.steps(12):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            guard.step_end()
    return guard


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("asked", [False, True])
def test_a_handler_that_raises_in_the_middle_of_an_update_costs_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    """`asked`: ``signals=`` has its number."""
    saved: list[int] = []

    def requeue(signum: int, frame: object) -> None:
        saved.append(len(list(tmp_path.glob("*.safetensors"))))
        raise Requeued(144)

    def at(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
        def tell(*_: object) -> None:
            if guard.step == 5:
                os.kill(os.getpid(), signal.SIGUSR2)
                if asked:
                    guard.stopper.step_gate.wait_for_limit(60)

        optimizer.register_step_post_hook(tell)

    before = signal.signal(signal.SIGUSR2, requeue)
    options = {"signals": [signal.SIGTERM, signal.SIGUSR2]} if asked else {}
    try:
        with pytest.raises(SystemExit) as left:
            train(tmp_path, at, **options)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert left.value.code == (128 + signal.SIGUSR2 if asked else 144)
    assert saved == [int(asked)], "it was called, once: after the save where the guard was asked, else at the boundary"
    (path,) = tmp_path.glob("*_breakpoint.safetensors")
    assert read_header(path).info.step == 6
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.usefixtures("alone")
def test_an_update_that_does_not_end_holds_no_handler_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_GRACE_S", "0.5")
    called: list[int] = []

    def at(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
        def hang(*_: object) -> None:
            if not called:
                os.kill(os.getpid(), signal.SIGUSR2)
            while not called:
                time.sleep(0.01)

        optimizer.register_step_post_hook(hang)

    before = signal.signal(signal.SIGUSR2, lambda signum, frame: called.append(signum))
    try:
        train(tmp_path, at)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert called == [signal.SIGUSR2]
