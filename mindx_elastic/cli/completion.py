"""``mindx-elastic completion``: a shell's completion, as a script without a call of ours in it.

The script holds every command and option as text. To ask Python at each TAB would take its start, and torch's for
``run``, whose options are torchrun's.
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import typer

__all__ = ["Shell", "completion_command"]

_FILE_NAMES = ("FILE", "DIR", "PATH", "RUN_DIR")


class Shell(str, Enum):
    """Whose script is printed."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]
    says: str
    takes_value: bool
    values: tuple[str, ...] = ()
    is_file: bool = False


@dataclass(frozen=True)
class _Command:
    name: str
    says: str
    options: tuple[_Option, ...]
    values: tuple[str, ...] = ()
    """Of the first argument; empty: files."""


def completion_command(
    ctx: typer.Context,
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print the completion script of a shell: commands, options (torchrun's too), their values, and files.

    The script is text and starts nothing when TAB is pressed. Write it again after an update of this package or torch.

    \b
    [bold]Examples[/bold]
    mindx-elastic completion bash > ~/.local/share/bash-completion/completions/mindx-elastic
    mindx-elastic completion zsh > ~/.zfunc/_mindx-elastic        a folder in fpath, before compinit
    mindx-elastic completion fish > ~/.config/fish/completions/mindx-elastic.fish
    """
    group: Any = ctx.find_root().command
    options = tuple(_options_of(group))
    commands = [_command(name, each) for name, each in group.commands.items() if not each.hidden]
    make = {Shell.BASH: _bash, Shell.ZSH: _zsh, Shell.FISH: _fish}[shell]
    typer.echo("\n".join(make(options, commands)))


# --- what there is ---


def _command(name: str, command: Any) -> _Command:
    says = _first_sentence(command.help or "")
    if name == "run":
        from mindx_elastic.agent.options import whole_parser

        return _Command(name, says, tuple(_options_of_parser(whole_parser())))
    if name == "msrun":
        from mindx_elastic.cluster.launch import make_parser

        return _Command(name, says, tuple(_options_of_parser(make_parser())))
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    return _Command(name, says, tuple(_options_of(command)), _words_of(arguments[0].metavar or "") if arguments else ())


def _options_of(command: Any) -> Iterator[_Option]:
    for each in command.params:
        if each.param_type_name == "option" and not each.hidden:
            names = (*each.opts, *each.secondary_opts)
            metavar = each.metavar or ""
            values, is_file = _words_of(metavar), metavar in _FILE_NAMES
            yield _Option(names, _first_sentence(each.help or ""), not each.is_flag, values, is_file)
    yield _Option(("--help", "-h"), "Show this message and exit.", takes_value=False)


def _options_of_parser(parser: ArgumentParser) -> Iterator[_Option]:
    for each in parser._actions:
        names = tuple(name for name in each.option_strings if "_" not in name) or tuple(each.option_strings)
        if names:
            metavar = each.metavar if isinstance(each.metavar, str) else ""
            values = tuple(map(str, each.choices or ())) or _words_of(metavar)
            says = _first_sentence((each.help or "").replace("%%", "%"))
            is_file = metavar in _FILE_NAMES or any(name.endswith(("-dir", "-file")) for name in names)
            yield _Option(names, "" if says == "==SUPPRESS==" else says, each.nargs != 0, values, is_file)


def _words_of(metavar: str) -> tuple[str, ...]:
    """The values that may be typed as they stand, of ``N|auto|0``."""
    words = metavar.split("|") if "|" in metavar else []
    return tuple(word for word in words if not word.isupper())


def _first_sentence(text: str) -> str:
    """Of a help text; without what a shell's menus would take for markup."""
    line = " ".join(text.split("\n\n")[0].split())
    return line.split(". ")[0].split(": ")[0].rstrip(".").replace("`", "").replace("[", "(").replace("]", ")")[:90]


# --- bash ---


def _bash(options: Sequence[_Option], commands: Sequence[_Command]) -> Iterator[str]:
    yield """\
# completion of mindx-elastic for bash; made by: mindx-elastic completion bash
_mindx_elastic() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= at word
    COMPREPLY=()
    if [[ $current == = ]]; then  # --option=, which bash cuts at the =
        current=
    elif [[ $before == = ]]; then
        before=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((at = 1; at < COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        if [[ -z $command ]]; then
            [[ $word == -* ]] || command=$word
        elif [[ $word == -- || $word == *.py ]]; then
            return  # what follows is the script's: files
        fi
    done
    local words=
    case $command in"""
    yield from _bash_case("''", _Command("", "", tuple(options), tuple(each.name for each in commands)))
    for each in commands:
        yield from _bash_case(each.name, each)
    yield """\
    esac
    [[ -z $words ]] || mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -o default -F _mindx_elastic mindx-elastic"""


def _bash_case(name: str, command: _Command) -> Iterator[str]:
    """With `words` empty, -o default completes files; where nothing can be completed it is switched off."""
    yield f"    {name})"
    yield "        case $before in"
    mute: list[str] = []
    for each in command.options:
        if each.values:
            yield f"            {'|'.join(each.names)}) words={shlex.quote(' '.join(each.values))} ;;"
        elif each.is_file:
            yield f"            {'|'.join(each.names)}) ;;"
        elif each.takes_value:
            mute += each.names
    if mute:
        yield f"            {'|'.join(mute)}) compopt +o default ;;"
    every = shlex.quote(" ".join(name for each in command.options for name in each.names))
    values = f"words={shlex.quote(' '.join(command.values))}" if command.values else ":"
    yield f"            *) if [[ $current == -* ]]; then words={every}; else {values}; fi ;;"
    yield "        esac ;;"


# --- zsh ---


def _zsh(options: Sequence[_Option], commands: Sequence[_Command]) -> Iterator[str]:
    yield """\
#compdef mindx-elastic
# completion of mindx-elastic for zsh; made by: mindx-elastic completion zsh
_mindx_elastic() {
    local current=${words[CURRENT]} before=${words[CURRENT-1]} command= at word
    local -a found
    for ((at = 2; at < CURRENT; at++)); do
        word=${words[at]}
        if [[ -z $command ]]; then
            [[ $word == -* ]] || command=$word
        elif [[ $word == -- || $word == *.py ]]; then
            _files
            return
        fi
    done
    case $command in"""
    names = tuple(each.name for each in commands)
    yield from _zsh_case("''", _Command("", "", tuple(options), names), {each.name: each.says for each in commands})
    for each in commands:
        yield from _zsh_case(each.name, each, {})
    yield """\
    esac
}
if [[ ${funcstack[1]} == _mindx-elastic ]]; then _mindx_elastic "$@"; else compdef _mindx_elastic mindx-elastic; fi"""


def _zsh_case(name: str, command: _Command, says: dict[str, str]) -> Iterator[str]:
    yield f"    {name})"
    yield "        case $before in"
    mute: list[str] = []
    for each in command.options:
        if each.values:
            yield f"            {'|'.join(each.names)}) compadd -- {shlex.join(each.values)} ;;"
        elif each.is_file:
            yield f"            {'|'.join(each.names)}) _files ;;"
        elif each.takes_value:
            mute += each.names
    if mute:
        yield f"            {'|'.join(mute)}) _message value ;;"
    every = _described((name, each.says) for each in command.options for name in each.names)
    yield "            *) if [[ $current == -* ]]; then"
    yield f"                found=({every}); _describe option found"
    if command.values:
        yield f"            else found=({_described((each, says.get(each, '')) for each in command.values)})"
        yield "                _describe value found"
    else:
        yield "            else _files"
    yield "            fi ;;"
    yield "        esac ;;"


def _described(pairs: Iterable[tuple[str, str]]) -> str:
    return " ".join(shlex.quote(f"{name}:{says}" if says else name) for name, says in pairs)


# --- fish ---


def _fish(options: Sequence[_Option], commands: Sequence[_Command]) -> Iterator[str]:
    yield """\
# completion of mindx-elastic for fish; made by: mindx-elastic completion fish
function __mindx_elastic_at
    # whether the command is $argv[1] ('' for none yet), and the script has not come yet
    set -l found ''
    for word in (commandline -opc)[2..]
        if test -z "$found"
            string match -q -- '-*' $word; or set found $word
        else if test "$word" = --; or string match -q -- '*.py' $word
            return 1
        end
    end
    test "$found" = "$argv[1]"
end"""
    start = "complete -c mindx-elastic -n"
    at_start = shlex.quote("__mindx_elastic_at ''")
    for option in options:
        yield f"{start} {at_start} {_fish_option(option)}"
    for command in commands:
        yield f"{start} {at_start} -f -a {command.name} -d {_fish_quote(command.says)}"
        here = f"{start} '__mindx_elastic_at {command.name}'"
        if command.values:
            yield f"{here} -f -a {_fish_quote(' '.join(command.values))}"
        for option in command.options:
            yield f"{here} {_fish_option(option)}"


def _fish_option(option: _Option) -> str:
    words = [f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in option.names]
    if option.takes_value:
        words.append("-r" if option.is_file else "-x")
    if option.values:
        words.append(f"-a {_fish_quote(' '.join(option.values))}")
    return " ".join([*words, *([f"-d {_fish_quote(option.says)}"] if option.says else [])])


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
