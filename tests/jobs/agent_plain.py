"""A script that has never heard of mindx_elastic, for the tests of the agent.

    agent_plain.py ACTION [ARGUMENT...]

Prints ``READY rank pid attempt`` first, then does what ACTION says; see the functions.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
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


def leave(code: str, only_rank: str = "-1", only_attempt: str = "-1") -> None:
    """Exit with `code`, or with 0 on other ranks and attempts."""
    wanted = int(only_rank) in (-1, RANK) and int(only_attempt) in (-1, ATTEMPT)
    sys.exit(int(code) if wanted else 0)


def world(size: str) -> None:
    """Succeed in a world of that size, wait in any other."""
    say(f"WORLD {os.environ['WORLD_SIZE']}")
    if os.environ["WORLD_SIZE"] != size:
        wait()


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


def ignore() -> None:
    """Never stop for a SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()


def nest() -> None:
    """Start a child, as a loader worker is one, that tells whether it gets the SIGTERM; leave 0.3 s after ours."""
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'CHILD-SIGTERM\\n'))\n"
        "os.write(1, b'CHILD-READY %d\\n' % os.getpid())\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code])

    def leave_now(signum: int, frame: object) -> None:
        time.sleep(0.3)
        child.kill()
        child.wait()
        say("PARENT-LEAVES")
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave_now)
    wait()


def gloo(fail_attempts: str = "1") -> None:
    """Meet the others and add up ranks; in the first attempts rank 1 is killed after that."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([float(RANK + 1)])
    dist.all_reduce(value)
    say(f"SUM {RANK} {ATTEMPT} {value.item():g} {os.environ['MASTER_PORT']}")
    if int(fail_attempts) > ATTEMPT:
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # the death of rank 1 ends it
    dist.destroy_process_group()


ACTIONS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (show, leave, world, die, wait, hold, ignore, nest, gloo)
}

if __name__ == "__main__":
    say(f"READY {RANK} {os.getpid()} {ATTEMPT}")
    ACTIONS[sys.argv[1]](*sys.argv[2:])
