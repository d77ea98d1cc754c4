"""Ties a process to the one that has started it; as a program, the step between the agent and a worker's own.

::

    python -I -S child.py AGENT_PID COMMAND [ARGUMENT...]

From here on the kernel sends the process a SIGTERM when its agent dies, however that dies (SIGKILL too), and keeps that
promise over the exec. The process id does not change. Uses nothing but the standard library and must start in
milliseconds. A fork of the zygote, and the zygote itself, call `tie`.

Rejected: `preexec_fn` (runs Python between fork and exec of a process with threads), a wrapper process that stays
(signals would have to be handed through it), a pipe that the worker watches (plain scripts would not).
"""

import ctypes
import os
import signal
import sys

__all__ = ["shim", "tie"]

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN, _NOT_FOUND = 126, 127  # the shell's words for it


def shim() -> tuple[str, ...]:
    """What stands before a command line that is to be tied to this process."""
    return sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid())


def tie(parent: int, signum: int) -> str:
    """Have the kernel send this process `signum` when the thread that has started it ends, one of the process `parent`.
    Why the kernel refuses; empty: it does not. Ends this process where the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    problem = "" if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) == 0 else os.strerror(ctypes.get_errno())
    if os.getppid() != parent:  # no signal will come
        os._exit(128 + signum)
    return problem


def _main() -> None:
    agent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if problem := tie(agent_pid, signal.SIGTERM):
        # Not Linux as we know it (some sandboxes): the program runs all the same, it only may outlive its agent.
        sys.stderr.write(f"mindx-elastic: this worker may outlive its agent: {problem}\n")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"mindx-elastic: cannot run {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN)


if __name__ == "__main__":
    _main()
