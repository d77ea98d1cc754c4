"""``mindx-elastic logs``: the last lines of the ranks that have failed."""

from __future__ import annotations

from typing import Annotated

import typer

from mindx_elastic.cli.common import EXIT_NOTHING, RUN_DIR, RunDirArgument, fail, find_runs
from mindx_elastic.core.printable import printable, printable_block

__all__ = ["logs_command"]


def logs_command(
    path: RunDirArgument = RUN_DIR,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only this rank.", show_default="all")] = None,
) -> None:
    """Show the last 200 lines that each failed rank wrote to stderr, its exception among them.

    The agent keeps them in RUN_DIR/last_lines, one file a rank of its node, of the rank's last failure before which it
    wrote any: also of a rank that failed before it had a guard. What ranks print to stdout is not kept (run
    --redirects 3 does that).

    \b
    [bold]Exit code[/bold]
    0  an agent has run there, whether a rank failed or not
    2  wrong usage, for example no such RUN_DIR
    3  no agent has run there

    \b
    [bold]Examples[/bold]
    mindx-elastic logs
    mindx-elastic logs mindx-run --rank 1
    """
    from mindx_elastic.agent.history import read_last_lines

    runs = find_runs(path)
    try:
        kept = read_last_lines(path if path.is_dir() else path.parent)
    except OSError as error:
        fail(f"{error.filename} cannot be read: {error.strerror}")
    found = [lines for each, lines in sorted(kept.items()) if rank in (None, each)]
    for lines in found:
        typer.echo(printable_block("\n".join([*lines, ""])))
    if not found:
        of = "no rank has" if rank is None else f"rank {rank} has not"
        none = f"nothing is kept in {path}: {of} failed, or nothing was written to stderr"
        typer.echo(printable(none if runs else f"no agent has run in {path}"))
        if not runs:
            raise typer.Exit(EXIT_NOTHING)
