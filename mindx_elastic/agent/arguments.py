"""Takes a torchrun command line apart: the launcher's own options, then the script and what is the script's.

torchrun leaves both to argparse, with two effects that a launcher with more options must not have. Abbreviations
(``--max-restart 2``) become ambiguous with each option that is added: here one that means something to torchrun means
the same to us, and only what means nothing to torchrun can stand for an option of ours. And argparse looks for
abbreviations among the script's arguments too (some versions of Python make torchrun refuse ``train.py --rdzv x``):
here they are not looked at.
"""

from __future__ import annotations

import re
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Collection, Sequence

__all__ = ["CommandLine", "split"]

_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")  # argparse's own: no option, where no option looks like one


class CommandLine:
    """The two parts of a command line."""

    def __init__(self, options: Sequence[str], rest: Sequence[str], *, wants_help: bool) -> None:
        self.options = tuple(options)
        """Options with their full names, and their values."""
        self.rest = tuple(rest)
        """The script and its arguments; a ``--`` may stand anywhere, as it was given."""
        self.wants_help = wants_help
        """``-h`` or ``--help`` is among the options."""

    def parse(self, parser: ArgumentParser) -> Namespace:
        """What torchrun's parser makes of it. Leaves with exit code 2 for what it refuses."""
        # Numbers stand for the words, so that the parser can do to each "--" what its version of Python does.
        masked = [word if word == "--" else str(index) for index, word in enumerate(self.rest)]
        parser.allow_abbrev = False
        args = parser.parse_args([*self.options, *masked])
        args.training_script = self.rest[int(args.training_script)]
        args.training_script_args = [
            word if word == "--" else self.rest[int(word)] for word in args.training_script_args
        ]
        return args


def split(parser: ArgumentParser, ours: Collection[str], arguments: Sequence[str]) -> CommandLine:
    """Divide `arguments`. Leaves with exit code 2, and the candidates, for an ambiguous abbreviation.

    parser: knows torchrun's options and ours. ours: the names of those that torchrun has not.
    """
    actions = {name: action for action in parser._actions for name in action.option_strings}
    theirs = {name: action for name, action in actions.items() if name not in ours}
    options: list[str] = []
    wants_help, index = False, 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--" or not _is_option(word, actions):
            break
        name, equals, value = word.partition("=")
        if word.startswith("--") and name not in actions:
            name = _complete(parser, name, theirs) or _complete(parser, name, actions) or name
        wants_help = wants_help or name in ("-h", "--help")
        options.append(f"{name}{equals}{value}")
        index += 1
        if not equals and _takes_next(name, actions) and index < len(arguments):
            options.append(arguments[index])
            index += 1
    return CommandLine(options, arguments[index:], wants_help=wants_help)


def _is_option(word: str, actions: Collection[str]) -> bool:
    """As argparse sees it: a negative number, or a word with a space that is no known option, is an argument."""
    if len(word) < 2 or not word.startswith("-"):
        return False
    return word.partition("=")[0] in actions or not (_NEGATIVE_NUMBER.match(word) or " " in word.partition("=")[0])


def _complete(parser: ArgumentParser, name: str, actions: dict[str, Action]) -> str:
    """The full name that `name` abbreviates; empty where there is none. Two spellings of one option are one option."""
    found: dict[int, str] = {}
    for full, action in actions.items():
        if full.startswith(name):
            found.setdefault(id(action), full)
    if len(found) > 1:
        parser.error(f"ambiguous option: {name} could match {', '.join(found.values())}")
    return next(iter(found.values()), "")


def _takes_next(name: str, actions: dict[str, Action]) -> bool:
    """Whether the next word is the option's value. Short options may be joined: ``-mr 3``, ``-r3``."""
    if name in actions:
        return actions[name].nargs is None
    if name.startswith("--"):
        return False
    for position, letter in enumerate(name[1:], start=2):
        action = actions.get(f"-{letter}")
        if action is None:
            return False
        if action.nargs is None:
            return position == len(name)
    return False
