"""A small job that rehearses its resume in step 3, and shows what its process began with and how it ended.

Prints ``BEGINS pid folder variable action-of-SIGTERM``, ``STEP number``, ``ENDS`` (at the interpreter's end) and
``DONE sha256``. Its count is not kept. ``MODE``: ``exact``, ``full`` (no file can be written from step 3 on), ``again``
(a SIGTERM in the step that is played on).
"""

from __future__ import annotations

import atexit
import hashlib
import os
import resource
import signal
import sys

import torch

from mindx_elastic import Guard


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(directory: str, mode: str) -> None:
    say(f"BEGINS {os.getpid()} {os.getcwd()} {os.environ.get('SET_BY_PROGRAM')} {signal.getsignal(signal.SIGTERM)}")
    os.environ["SET_BY_PROGRAM"] = "1"
    os.chdir("/")
    atexit.register(say, "ENDS")
    notes = open(os.path.join(directory, "notes"), "a")  # noqa: SIM115  # only the end of the process flushes it
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model=model, optimizer=optimizer, directory=os.path.join(directory, "ckpt"), rehearse=3)
    with guard:
        count = 0
        for step in guard.steps(6):
            say(f"STEP {step}")
            count += 1
            if mode == "full" and step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            if mode == "again" and step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            notes.write(f"{step}\n")
            guard.step_end()
    assert count
    say(f"DONE {hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()}")


main(*sys.argv[1:])
