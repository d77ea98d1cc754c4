"""``mindx-elastic run``: torchrun with an agent that restarts the job without losing steps. ``mindx-elastic msrun``: a
dynamic cluster with the options of MindSpore's launcher.

Both command lines are read by argparse, which torchrun's options come from. `_listed` shows them as typer shows the
other commands' options.
"""

from __future__ import annotations

import inspect
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mindx_elastic.cli.common import unwrapped

__all__ = ["RUN_SETTINGS", "MsrunCommand", "RunCommand", "msrun_command", "run_command"]

RUN_SETTINGS: dict[str, Any] = {"help_option_names": []}
_FIRST = (
    *("--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--max-restarts", "--recover", "--snapshot-every"),
    *("--grace", "--hang-timeout", "--notice", "--run-dir"),
)
_Panels = Mapping[str, Iterable[Action]]
_Words = Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENTS]", show_default=False)]


class _LauncherCommand(TyperCommand):
    """Passes every argument on: the launcher reads the options, the script those after its name."""

    panels: Callable[[], _Panels]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Behind this one nothing is looked at. Without it a "--" of the user's would be taken out.
        return super().parse_args(ctx, ["--", *args])

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        listed = _listed(self, self.panels())
        return listed.shell_complete(ctx, incomplete)

    def show_help(self, ctx: typer.Context) -> None:
        """Print the help with every option of the launcher."""
        _listed(self, self.panels()).main(["--help"], prog_name=ctx.command_path, standalone_mode=False)


def _listed(command: Any, panels: _Panels) -> Any:
    """`command` as if typer read these options: to show and complete them, not to run."""
    words = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]", hidden=True)]
    parameters = [inspect.Parameter("words", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=words)]
    for panel, actions in panels.items():
        for option in _options(panel, actions):
            name = f"option_{len(parameters)}"
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option))

    def nothing(**_: object) -> None: ...

    nothing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    nothing.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(command.name, help=command.help, context_settings=settings)(nothing)
    return typer.main.get_command(app)


def _options(panel: str, actions: Iterable[Action]) -> Iterator[Any]:
    for each in actions:
        if not each.option_strings or "--help" in each.option_strings or each.help == SUPPRESS:
            continue
        long = [name for name in each.option_strings if name.startswith("--")]
        names = [*long[:1], *(name for name in each.option_strings if name not in long)]
        text = unwrapped((each.help or "").replace("%%", "%")).replace("[", r"\[")
        text = f"{text[:1].upper()}{text[1:].rstrip('.')}."
        if each.nargs == 0:
            yield Annotated[bool, typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)]
            continue
        choices = "|".join(map(str, each.choices or ()))
        metavar = each.metavar if isinstance(each.metavar, str) else choices or each.dest.upper()
        yield Annotated[
            str | None, typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False)
        ]


class RunCommand(_LauncherCommand):
    @staticmethod
    def panels() -> _Panels:
        """The ten options that most jobs are started with, then ours, then torchrun's."""
        from mindx_elastic.agent.options import own_actions, torchrun_actions

        own, theirs = own_actions(), torchrun_actions()
        by_name = {name: action for action in [*own, *theirs] for name in action.option_strings}
        first = [by_name[name] for name in _FIRST if name in by_name]
        return {
            "Options that matter first": first,
            "Other options": [action for action in own if action not in first],
            "Other options of torchrun": [action for action in theirs if action not in first],
        }


class MsrunCommand(_LauncherCommand):
    @staticmethod
    def panels() -> _Panels:
        from mindx_elastic.cluster.msrun import make_parser

        return {"Options": make_parser()._actions}


def run_command(ctx: typer.Context, arguments: _Words = None) -> None:
    """Start a training job as torchrun does, and restart it after a failure without losing steps.

    A killed worker, a hanging one or a lost agent costs no more steps than it must. A script without mindx_elastic runs
    as under torchrun; one with a Guard, Model or our callbacks saves its last step whatever happens, and goes on from
    it after the restart. torchrun's options mean the same; only without --max-restarts there are 3 restarts, not 0.

    \b
    [bold]Exit code[/bold]
    0    finished
    75   worth another start: fault report, flag file, nodes that cannot meet
    143  a graceful stop on SIGTERM
    2    wrong usage
    The script's own code when it fails, 128 + number when a signal killed it.

    \b
    [bold]Examples[/bold]
    mindx-elastic run --nproc-per-node 2 train.py --epochs 3
    mindx-elastic run --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py
    mindx-elastic run --nproc-per-node 2 --recover in-place --snapshot-every 1 train.py
    """
    from mindx_elastic.agent.launcher import launch

    command: Any = ctx.command
    raise SystemExit(launch(arguments or [], show_help=lambda: command.show_help(ctx)))


def msrun_command(ctx: typer.Context, arguments: _Words = None) -> None:
    """Start the scheduler and this machine's workers of a dynamic cluster, as MindSpore's msrun does.

    \b
    [bold]Examples[/bold]
    mindx-elastic msrun --worker_num=8 --local_worker_num=8 --join=True train.py
    """
    from mindx_elastic.cluster.msrun import main

    command: Any = ctx.command
    raise SystemExit(main(arguments or [], show_help=lambda: command.show_help(ctx)))
