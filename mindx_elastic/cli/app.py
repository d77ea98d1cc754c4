"""The commands of ``mindx-elastic`` and their common options.

Nothing here imports torch: each command imports what it needs when it runs, so that ``--help``,
``--version`` and a mistyped option answer at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mindx_elastic.cli.audit import audit_command
from mindx_elastic.cli.clean import clean_command
from mindx_elastic.cli.common import EXIT_CODES_HELP, unwrapped
from mindx_elastic.cli.convert import convert_command
from mindx_elastic.cli.doctor import doctor_command
from mindx_elastic.cli.inspect import inspect_command
from mindx_elastic.cli.logs import logs_command
from mindx_elastic.cli.pause import pause_command, resume_command
from mindx_elastic.cli.plan import plan_command
from mindx_elastic.cli.prove import SCRIPT_SETTINGS, ScriptCommand, drill_command, prove_command
from mindx_elastic.cli.report import report_command
from mindx_elastic.cli.run import LAUNCHERS
from mindx_elastic.cli.status import status_command
from mindx_elastic.cli.verify import verify_command

__all__ = ["app"]

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
    "Run a job": {**LAUNCHERS, "pause": pause_command, "resume": resume_command},
    "Look at a job": {
        "status": status_command,
        "logs": logs_command,
        "report": report_command,
        "audit": audit_command,
    },
    "Look at checkpoints": {
        "inspect": inspect_command,
        "verify": verify_command,
        "plan": plan_command,
        "convert": convert_command,
    },
    "Try a job": {"doctor": doctor_command, "prove": prove_command, "drill": drill_command},
    "After a job": {"clean": clean_command},
}
_OTHER_PARSERS: dict[str, dict[str, Any]] = {
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
    mindx-elastic status                          what happened; what would be lost if it died now
    mindx-elastic logs                            the last lines of failed ranks
    mindx-elastic report -o report.html           the whole run as one page to look at
    mindx-elastic audit                           do its last steps again beside it: the same?
    mindx-elastic pause                           let all ranks wait at one step; then: resume
    mindx-elastic inspect ckpt                    list the checkpoints; verify recomputes every digest
    mindx-elastic plan ckpt                       say from which step the next start would resume, and why
    mindx-elastic convert ckpt weights.pt         weights for other programs
    mindx-elastic doctor ckpt --state 18GiB       before the first run: is anything wrong?
    mindx-elastic prove -- train.py               stop and resume it, and compare every step
    mindx-elastic drill --random 20 -- train.py   break it in 20 ways: what was lost?
    mindx-elastic clean                           list what dead jobs have left in shared memory

    status, logs, report, pause and resume look into ./mindx-run, where run writes, if no RUN_DIR is given.
    --install-completion lets TAB complete all of this; --json, where a command has it, gives the same to scripts.
    """
    if debug:
        os.environ["MINDX_DEBUG"] = "1"
