"""The exit code of a stop. Every process of a job takes its code from here: workers, the last resort, the agent.

=========================================  ===========================================================
what stops the job                         exit code
=========================================  ===========================================================
a signal                                   128 + its number: 143 SIGTERM, 130 SIGINT, 138 SIGUSR1, 129 SIGHUP
a flag file, a fault report                75
the death of another rank or of the agent  75
``guard.request_stop(reason, code)``       the code it names, 0 by default
an order of the agent                      the code it names, 75 by default
an exception                               1 on the rank that raised it, 75 on the others
=========================================  ===========================================================

`ExitPolicy.exit_codes` replaces the code of signals, flag files, fault reports, deaths and orders. All ranks exit with
the code of the rank that heard the alarm first, if their messages are sealed (`agreement.sealed`). If they are not, a
stranger can write a stop request: each rank then applies the table and its own policies, and turns a request's 0 (the
training is finished, do not restart it) into 75.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

__all__ = [
    "EXIT_ERROR",
    "EXIT_TEMPORARY",
    "EXIT_USAGE",
    "STOP_SIGNALS",
    "exit_code",
    "exit_code_from_peer",
    "exit_code_of_signal",
]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""They stop a job, unless its policies say otherwise. SIGHUP: the terminal of an ssh session is closed."""
_ERRORS = ("exception", "unmanaged")
EXIT_ERROR, EXIT_USAGE = 1, 2
EXIT_TEMPORARY = 75
"""EX_TEMPFAIL of sysexits.h: start the job again."""


def exit_code_of_signal(signum: int) -> int:
    """128 + number, the shell's convention; 143 for SIGTERM."""
    return 128 + signum


def exit_code(
    kind: str, overrides: Mapping[str, int] | None = None, *, signum: int | None = None, named: int | None = None
) -> int:
    """The code for an alarm that this rank has heard itself.

    kind: see `alarm.ALARM_KINDS`. overrides: codes of the policies, by kind. signum: of a signal. named: the code that
    a request or an order asks for.
    """
    if kind in _ERRORS:
        return EXIT_ERROR
    if overrides and kind in overrides:
        return overrides[kind]
    if named is not None:
        return named
    return exit_code_of_signal(signum) if kind == "signal" and signum is not None else EXIT_TEMPORARY


def exit_code_from_peer(
    kind: str, overrides: Mapping[str, int], *, signum: int | None, named: int, is_sealed: bool
) -> int:
    """The code for an alarm that another rank has sent, with the code `named` that it exits with itself."""
    if kind in _ERRORS:
        return EXIT_TEMPORARY
    if is_sealed:
        return named
    if kind == "request":
        return named or EXIT_TEMPORARY
    if kind == "signal" and signum is None:  # that rank's agent is gone
        return EXIT_TEMPORARY
    return exit_code(kind, overrides, signum=signum)
