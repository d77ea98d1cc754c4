"""Makes this process what ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS`` is before the script's first
line.

The script becomes ``__main__`` in a new module, with its folder (with ``-m``: the working directory) first on
the path."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.errors import UsageError

__all__ = ["prepare", "puts_folder_first", "script_folder"]


def prepare(command: Sequence[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Set ``sys.argv``, ``sys.path[0]`` and ``__main__``; the script's code, and the namespace to run it in.

    The first entry of ``sys.path`` is replaced, where the interpreter puts a folder there. Raises UsageError for a
    module that cannot be run, and what reading the script raises.
    """
    if command[0] == "-m":
        code, module, first = _module(command[1])
        sys.argv = [str(module.__file__), *command[2:]]
    else:
        path = os.path.abspath(command[0])
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        module = types.ModuleType("__main__")
        module.__file__, module.__loader__ = path, loader
        module.__dict__["__cached__"] = None
        code = loader.source_to_code(Path(path).read_bytes(), path)
        first = script_folder(command)
        sys.argv = [*command]
    module.__dict__["__builtins__"] = builtins
    module.__dict__.setdefault("__annotations__", {})
    sys.modules["__main__"] = module
    if puts_folder_first():
        sys.path[0] = first
    return code, module.__dict__


def script_folder(command: Sequence[str]) -> str:
    """The folder that the interpreter puts first on the path for `command`."""
    return os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.realpath(command[0]))


def puts_folder_first() -> bool:
    """Whether this interpreter puts the script's folder on the path (not with ``-P`` and ``-I``)."""
    return not getattr(sys.flags, "safe_path", sys.flags.isolated)


def _module(name: str) -> tuple[Any, types.ModuleType, str]:
    """As ``python -m``: a package stands for its ``__main__``."""
    first = os.getcwd()
    if puts_folder_first():
        sys.path[0] = first  # the module is looked for there, too
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise UsageError(f"-m {name}: no such module that can be run")
    module = types.ModuleType("__main__")
    module.__file__, module.__loader__, module.__spec__ = spec.origin, spec.loader, spec
    module.__package__ = spec.parent
    module.__dict__["__cached__"] = spec.cached
    return spec.loader.get_code(spec.name), module, first
