"""The console command ``mindx-elastic``.

Nothing here imports torch: each command imports what it needs when it runs, so that ``--help``,
``--version`` and a mistyped option answer at once.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from mindx_elastic.cli.clean import clean_command
from mindx_elastic.cli.common import EXIT_CODES_HELP, EXIT_INTERNAL, EXIT_USAGE, debugging, tell_error, unwrapped
from mindx_elastic.cli.convert import convert_command
from mindx_elastic.cli.doctor import doctor_command
from mindx_elastic.cli.drill import drill_command
from mindx_elastic.cli.inspect import inspect_command
from mindx_elastic.cli.logs import logs_command
from mindx_elastic.cli.manifest import manifest_command
from mindx_elastic.cli.pause import pause_command, resume_command
from mindx_elastic.cli.plan import plan_command
from mindx_elastic.cli.prove import prove_command
from mindx_elastic.cli.report import report_command
from mindx_elastic.cli.run import RUN_SETTINGS, LauncherCommand, msrun_command, run_command
from mindx_elastic.cli.scripts import SCRIPT_SETTINGS, ScriptCommand
from mindx_elastic.cli.status import status_command, top_command
from mindx_elastic.cli.verify import verify_command

__all__ = ["app", "main"]

_DEPENDENCIES = ("google.protobuf", "jinja2", "numpy", "safetensors", "torch", "xxhash")

app = typer.Typer(
    name="mindx-elastic",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Exit codes: {EXIT_CODES_HELP}.",
)
_Command = Callable[..., None]
_GROUPS: dict[str, dict[str, _Command]] = {
    "Run a job": {"run": run_command, "msrun": msrun_command, "pause": pause_command, "resume": resume_command},
    "Look at a job": {
        "status": status_command,
        "top": top_command,
        "logs": logs_command,
        "report": report_command,
    },
    "Look at checkpoints": {
        "inspect": inspect_command,
        "verify": verify_command,
        "plan": plan_command,
        "convert": convert_command,
    },
    "Try a job": {"doctor": doctor_command, "prove": prove_command, "drill": drill_command},
    "Around a job": {"manifest": manifest_command, "clean": clean_command},
}
_OTHER_PARSERS: dict[str, dict[str, Any]] = {
    "run": {"cls": LauncherCommand, "context_settings": RUN_SETTINGS},
    "msrun": {"cls": LauncherCommand, "context_settings": RUN_SETTINGS},
    "prove": {"cls": ScriptCommand, "context_settings": SCRIPT_SETTINGS},
    "drill": {"cls": ScriptCommand, "context_settings": SCRIPT_SETTINGS},
}
for _panel, _commands in _GROUPS.items():
    for _name, _function in _commands.items():
        app.command(_name, help=unwrapped(_function.__doc__), rich_help_panel=_panel, **_OTHER_PARSERS.get(_name, {}))(
            _function
        )


def _show_version(wanted: bool) -> None:
    if wanted:
        from mindx_elastic._version import __version__

        typer.echo(f"mindx-elastic {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show an error's traceback, too; MINDX_DEBUG=1 does the same.")
    ] = False,
) -> None:
    """Run training jobs that lose no steps, and inspect what they have written: checkpoints, runs, leftovers.

    \b
    [bold]Examples[/bold]
    mindx-elastic run --nproc-per-node 2 train.py like torchrun, but restarts without losing steps
    mindx-elastic top                             watch it: rates, and what would be lost if it died now
    mindx-elastic status                          what happened; logs: the last lines of failed ranks
    mindx-elastic report -o report.html           the whole run as one page to look at
    mindx-elastic pause                           let all ranks wait at one step; then: resume
    mindx-elastic inspect ckpt                    list the checkpoints; verify recomputes every digest
    mindx-elastic plan ckpt                       say from which step the next start would resume, and why
    mindx-elastic convert ckpt weights.pt         convert to and from other programs' formats
    mindx-elastic doctor ckpt --state 18GiB       before the first run: is anything wrong?
    mindx-elastic prove -- train.py               stop and resume it, and compare every step
    mindx-elastic drill --random 20 -- train.py   break it in 20 ways: what was lost?
    mindx-elastic manifest kubernetes --state 18GiB -- train.py     print a job for Kubernetes
    mindx-elastic clean --dry-run                 list what dead jobs have left in shared memory

    top, status, logs, report, pause and resume look into ./mindx-run, where run writes, if no RUN_DIR is given.
    --install-completion lets TAB complete all of this; --json gives the same to scripts.
    """
    if debug:
        os.environ["MINDX_DEBUG"] = "1"


def main() -> None:
    """Entry point of the console command; leaves the interpreter with the exit code."""
    from mindx_elastic.errors import MindxError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for text that the locale cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except MindxError as error:
        tell_error(error)
        raise SystemExit(EXIT_USAGE) from None
    except ModuleNotFoundError as error:
        if error.name not in _DEPENDENCIES:
            _end_of_unexpected(error)
        what = f"{error.name}, which this Python ({sys.executable}) does not have: pip install {error.name}"
        text = f"{' '.join(sys.argv[1:2])} needs {what}"
        tell_error(text)
        raise SystemExit(EXIT_USAGE) from None
    except OSError as error:
        if _is_job():
            raise
        place = f"{error.filename}: " if error.filename is not None else ""
        tell_error(f"{place}{error.strerror or error}{_how_to_see_more()}")
        raise SystemExit(EXIT_USAGE) from None
    except Exception as error:
        _end_of_unexpected(error)


def _end_of_unexpected(error: Exception) -> NoReturn:
    """One line, and the same command again with --debug gives the rest."""
    if _is_job():
        raise error
    tell_error(f"unexpected {type(error).__name__}: {error}{_how_to_see_more()}")
    raise SystemExit(EXIT_INTERNAL) from None


def _is_job() -> bool:
    """A job's error does not come again when asked for: run and msrun always show the traceback."""
    return next((word for word in sys.argv[1:] if not word.startswith("-")), "") in ("run", "msrun")


def _how_to_see_more() -> str:
    return "" if debugging() else f" (the traceback: mindx-elastic --debug {shlex.join(sys.argv[1:])})"


if __name__ == "__main__":
    main()
