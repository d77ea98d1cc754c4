"""The console command ``mindx-elastic``.

``run`` and ``msrun`` have their own parsers. They are started from here, because the one of the other commands takes
longer to import than all that an agent needs besides torch.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
from typing import NoReturn

from mindx_elastic.cli.run import LAUNCHERS

__all__ = ["main"]

_DEPENDENCIES = ("google.protobuf", "jinja2", "numpy", "safetensors", "torch", "xxhash")


def main() -> None:
    """Entry point of the console command; leaves the interpreter with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for text that the locale cannot show
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, a child's crash is taken for a success
    words = sys.argv[1:]
    while words[:1] == ["--debug"]:
        os.environ["MINDX_DEBUG"] = "1"
        del words[0]
    launcher = LAUNCHERS.get(words[0]) if words else None
    try:
        if launcher is not None:
            launcher(words[1:])
        else:
            from mindx_elastic.cli.app import app

            app()
    except KeyboardInterrupt:  # a command's parser has its own words for it
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        _end(error, is_job=launcher is not None)


def _end(error: Exception, *, is_job: bool) -> NoReturn:
    """One line, and for what is not expected: the same command again with --debug gives the rest. A job's error does
    not come again when asked for: its traceback is always shown."""
    from mindx_elastic.cli.common import EXIT_INTERNAL, EXIT_USAGE, debugging, tell_error
    from mindx_elastic.errors import MindxError

    code, more = EXIT_USAGE, ""
    if isinstance(error, MindxError):
        text = str(error)
    elif isinstance(error, ModuleNotFoundError) and error.name in _DEPENDENCIES:
        what = f"{error.name}, which this Python ({sys.executable}) does not have: pip install {error.name}"
        text = f"{' '.join(sys.argv[1:2])} needs {what}"
    elif is_job:
        raise error
    else:
        more = "" if debugging() else f" (the traceback: mindx-elastic --debug {shlex.join(sys.argv[1:])})"
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename is not None else ""
            text = f"{place}{error.strerror or error}"
        else:
            code, text = EXIT_INTERNAL, f"unexpected {type(error).__name__}: {error}"
    tell_error(text + more)
    raise SystemExit(code) from None


if __name__ == "__main__":
    main()
