"""A script that has never heard of mindx_elastic, for the tests of the agent.

    agent_plain.py ACTION [ARGUMENT...]

Prints ``READY rank pid attempt`` first, then does what ACTION says; see the functions.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(line: str, fd: int = 1) -> None:
    """One write a line: several ranks share the pipe, and their lines must not mix."""
    os.write(fd, f"{line}\n".encode())


def show(*arguments: str) -> None:
    """Print environment and arguments."""
    say("ENV " + json.dumps({"env": dict(os.environ), "argv": sys.argv[1:], "cwd": os.getcwd()}))
    say(f"ERR {RANK}", 2)


def leave(code: str, only_rank: str = "-1") -> None:
    """Exit with `code`, or with 0 on other ranks."""
    sys.exit(int(code) if int(only_rank) in (-1, RANK) else 0)


def die(signum: str, only_rank: str = "-1") -> None:
    """Be killed by a signal; other ranks wait."""
    if int(only_rank) in (-1, RANK):
        os.kill(os.getpid(), int(signum))
    wait()


def wait() -> None:
    """Until a signal ends it."""
    say(f"WAITING {RANK}")
    time.sleep(120)


def hold(fail_attempts: str = "0") -> None:
    """Wait until the file ``go-{attempt}`` is in the working directory; fail in the first attempts, then succeed."""
    terminal = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    ignored = [number.name for number in terminal if signal.getsignal(number) is signal.SIG_IGN]
    say(f"HOLDING {RANK} {ATTEMPT} ignores {'+'.join(ignored) or 'nothing'}")
    while not os.path.exists(f"go-{ATTEMPT}"):
        time.sleep(0.01)
    sys.exit(1 if int(fail_attempts) > ATTEMPT else 0)


ACTIONS: dict[str, Callable[..., None]] = {function.__name__: function for function in (show, leave, die, wait, hold)}

if __name__ == "__main__":
    say(f"READY {RANK} {os.getpid()} {ATTEMPT}")
    ACTIONS[sys.argv[1]](*sys.argv[2:])
