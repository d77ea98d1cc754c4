"""What programs and scripts of others depend on, held against one text file for each surface.

A change of such a file is a change that users see: it belongs in the changelog. To renew the files after a deliberate
change, run ``MINDX_RENEW_SURFACE=1 python -m pytest tests/test_public_surface.py`` and read
``git diff tests/data/surface``.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import typer.main

import mindx_elastic as mx
from mindx_elastic.agent.options import OWN_OPTIONS, make_parser
from mindx_elastic.cli.app import app

ROOT = Path(__file__).parents[1]
SURFACE = Path(__file__).parent / "data" / "surface"
RENEW = "MINDX_RENEW_SURFACE"
MODULES = [
    "mindx_elastic",
    "mindx_elastic.cluster",
    "mindx_elastic.data",
    "mindx_elastic.errors",
    "mindx_elastic.plan",
    "mindx_elastic.terminating_message",
    "mindx_elastic.train",
]
"""The modules that users import from."""


def compare(name: str, lines: Iterable[str]) -> None:
    """Hold `lines` against ``tests/data/surface/{name}.txt``; write the file instead where RENEW is set."""
    path, found = SURFACE / f"{name}.txt", list(lines)
    if os.environ.get(RENEW) == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    where = path.relative_to(ROOT).as_posix()
    diff = list(difflib.unified_diff(kept, found, where, "what the code has", lineterm="", n=0))
    assert not diff, (
        f"a public surface has changed:\n{chr(10).join(diff)}\n"
        f"If that is meant, say so in the changelog and renew the file: "
        f"{RENEW}=1 python -m pytest tests/test_public_surface.py"
    )


# --- names and signatures ---


def signature(function: Any) -> str:
    """The parameters with their defaults; without annotations, whose names may move."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=found.empty))
    return re.sub(r"<([\w.]+)\.(\w+): [^>]*>", r"\1.\2", text)  # <Signals.SIGTERM: 15>


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("mindx_elastic")


def fields_of(cls: type) -> list[str]:
    if not dataclasses.is_dataclass(cls):
        return []
    return [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]


def members(cls: type) -> list[str]:
    """The constructor and the public members; what a public base class has in the same form stands there."""
    lines = [] if issubclass(cls, enum.Enum) or is_protocol(cls) else [constructor(cls)]
    bases = [base for base in cls.__mro__[1:] if base in public_classes()]
    inherited = {line for base in bases for line in member_lines(base)}
    return [*lines, *(line for line in member_lines(cls) if line not in inherited)]


def member_lines(cls: type) -> list[str]:
    found: dict[str, Any] = {}
    for base in reversed([base for base in cls.__mro__ if is_ours(base)]):
        found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    found |= dict.fromkeys([*fields_of(cls), *declared_attributes(cls), *attributes_of(cls)])
    lines = []
    for name, value in sorted(found.items()):
        function = getattr(value, "__func__", value)
        lines.append(f".{name}{signature(function) if inspect.isfunction(function) else ''}")
    return lines


def is_protocol(cls: type) -> bool:
    return bool(getattr(cls, "_is_protocol", False))


def constructor(cls: type) -> str:
    made_by = inspect.getattr_static(cls, "__init__")  # also where a __new__ in front of it accepts anything
    if made_by is object.__init__:
        return "()"
    return re.sub(r"^\(self(, )?", "(", signature(made_by)) if inspect.isfunction(made_by) else "(...)"


def public_classes() -> list[type]:
    modules = map(importlib.import_module, MODULES)
    values = [getattr(module, name) for module in modules for name in module.__all__]
    return [value for value in values if inspect.isclass(value)]


def declared_attributes(cls: type) -> list[str]:
    """Public attributes that the class body declares."""
    names = [name for base in cls.__mro__ if is_ours(base) for name in inspect.get_annotations(base)]
    return [name for name in names if not name.startswith("_")]


def attributes_of(cls: type) -> list[str]:
    """Public attributes that the constructor sets, of the two classes that people hold in their hands."""
    if cls is mx.Guard:
        instance: Any = mx.Guard(directory="ckpt")
    elif cls is mx.Model:
        instance = mx.Model(torch.nn.Linear(1, 1))
    else:
        return []
    return [name for name in vars(instance) if not name.startswith("_")]


def describe(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        named = {base for cls in value.__mro__ if is_ours(cls) for base in cls.__bases__ if not is_ours(base)}
        shown = [base for base in value.__mro__[1:-1] if base in named or base in public_classes()]
        bases = ", ".join(base.__name__ for base in shown)
        return [f"class {name}({bases})", *(f"    {line}" for line in members(value))]
    if inspect.ismodule(value):
        return [f"module {name}"]
    if callable(value):
        return [f"def {name}{signature(value)}"]
    return [f"{name} = {value!r}"]


def public_names() -> Iterable[str]:
    described: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        yield f"# {module_name}"
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if id(value) in described:
                yield f"{name}  (as above)"
            else:
                described.add(id(value))
                yield from describe(name, value)
        yield ""


def test_names_and_signatures() -> None:
    compare("names", public_names())


def test_every_public_module_is_looked_at() -> None:
    """Modules that the package's own names lead to."""
    modules = {f"mindx_elastic.{name}" for name in mx.__all__ if inspect.ismodule(getattr(mx, name))}
    assert modules <= set(MODULES)


# --- the command line ---


def parameters(command: Any) -> list[str]:
    lines = []
    for parameter in command.params:
        words = [*parameter.opts, *parameter.secondary_opts, parameter.metavar or ""]
        words += [f"default {parameter.default!r}"] * (parameter.default is not None)
        words += [word for word in ("required", "multiple", "is_flag") if getattr(parameter, word, False)]
        words += [f"{bound} {getattr(parameter, bound)}" for bound in ("min", "max") if getattr(parameter, bound, None)]
        lines.append(f"    {' '.join(filter(None, words))}")
    return sorted(lines)


def test_commands_and_options() -> None:
    group: Any = typer.main.get_command(app)
    lines = []
    for name, command in [("", group), *sorted(group.commands.items())]:
        lines += [f"mindx-elastic {name}".rstrip(), *parameters(command)]
    lines += ["mindx-elastic run, before torchrun's own options"]
    (own,) = (group for group in make_parser()._action_groups if group.title == OWN_OPTIONS)
    for each in own._group_actions:
        metavar = each.metavar or (f"{{{','.join(each.choices)}}}" if each.choices else "")
        lines.append(f"    {each.option_strings[0]} {metavar}".rstrip())
    compare("command_line", lines)


# --- environment, events, files ---


def table(title: str) -> list[list[str]]:
    """The rows of the table under a heading of docs/reference.md; tests/test_docs.py compares it with the code."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"docs/reference.md has no section {title!r}"
    rows = [line.strip("|").split(" | ") for line in found[1].splitlines() if line[:3] == "| `"]
    return [[cell.strip() for cell in row] for row in rows]


def test_environment_variables() -> None:
    lines = []
    for title in ("Read by the package", "Written by `mindx-elastic plan --emit-env FILE`"):
        lines += [f"# {title}"]
        rows = [(name, row[1]) for row in table(title) for name in re.findall(r"`(\w+)`", row[0])]
        lines += [f"{name}, default {value}" if "Read" in title else name for name, value in sorted(rows)]
    compare("environment", lines)


def test_events() -> None:
    lines = []
    for title in ("`events.jsonl`", "In the run directory"):
        lines += [f"# {title}"]
        for row in table(title):
            fields = sorted(set(re.findall(r"`([a-z_]+)`", row[-1])))
            lines += [f"{row[0].strip('`')}: {' '.join(fields)}".rstrip(": ")]
    compare("events", lines)


def proto_fields(path: Path) -> list[str]:
    """``Message.field = number: type`` for each field of a protobuf schema."""
    lines, message = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if opened := re.match(r"\s*message (\w+)", line):
            message = opened[1]
        elif field := re.match(r"\s*((?:repeated |optional |required )?[\w.]+) (\w+) = (\d+)[ ;]", line):
            lines.append(f"    {message}.{field[2]} = {field[3]}: {field[1]}")
    return lines


def test_files_on_disk() -> None:
    """The keys in headers and JSON files, and the numbers of protobuf fields: what older and newer versions read."""
    lines = []
    for title in ("The checkpoint file", "The tree", "The layout record", "`resume_plan.json`"):
        lines += [f"# {title}", *sorted({f"    {name}" for row in table(title) for name in names_in(row)})]
    for path in sorted((ROOT / "mindx_elastic").rglob("*.proto"), key=lambda path: path.name):
        lines += [f"# {path.name}", *proto_fields(path)]
    compare("files", lines)


def names_in(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[0])
