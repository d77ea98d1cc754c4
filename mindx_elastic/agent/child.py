"""The step between the agent and a worker's program: tie the process to its agent, then become the program.

::

    python -I -S child.py AGENT_PID COMMAND [ARGUMENT...]

From here on the kernel sends the process a SIGTERM when its agent dies, however that dies (SIGKILL too), and keeps that
promise over the exec. The process id does not change. Uses nothing but the standard library and must start in
milliseconds.

Rejected: `preexec_fn` (runs Python between fork and exec of a process with threads), a wrapper process that stays
(signals would have to be handed through it), a pipe that the worker watches (plain scripts would not).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN, _NOT_FOUND = 126, 127  # the shell's words for it


def _main() -> None:
    agent_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM.value, 0, 0, 0) != 0:
        # Not Linux as we know it (some sandboxes): the program runs all the same, it only may outlive its agent.
        sys.stderr.write(f"mindx-elastic: this worker may outlive its agent: {os.strerror(ctypes.get_errno())}\n")
    if os.getppid() != agent_pid:  # it has died already, so no signal will come
        os._exit(128 + signal.SIGTERM.value)
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
