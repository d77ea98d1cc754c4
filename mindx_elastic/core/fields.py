"""Data classes out of JSON that others have written: each field by its type and its bounds.

What comes over a socket, through the store or out of a file is not trusted. The fields of a data class say what may be
in it, and `read` makes the object or says which field is wrong::

    @dataclass(frozen=True)
    class Farewell:
        how: Literal["done", "failed"]
        code: Annotated[int, Between(0, 255)]
        why: Annotated[str, Words(500)]

``dataclasses.asdict`` is the way back. Pure.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from mindx_elastic.core.printable import printable

__all__ = ["Between", "Text", "Words", "load_json", "read", "read_text", "read_value"]

_T = TypeVar("_T")


class Between(NamedTuple):
    """The bounds of a number, both allowed. Without them a whole number is 0 to 2**63, and any other one finite."""

    low: float
    high: float


class Text(NamedTuple):
    """The bound of a text that is compared or used as a name, in characters; 2000 by default."""

    most: int
    pattern: str = ""
    """The whole text matches it."""


class Words(NamedTuple):
    """The bound of a text for a person: a longer one is cut, and what a terminal would obey is escaped."""

    most: int


_NATURAL, _TEXT = Between(0, 1 << 63), Text(2000)
_FINITE = Between(-sys.float_info.max, sys.float_info.max)
_MOST_PARTS = 1 << 20
_WORDS = {bool: "true or false", str: "text", Path: "a path"}


def read(kind: type[_T], content: object, **given: Any) -> _T:
    """The data class `kind` with the fields in `content`; others there are ignored. `given`: fields that come from
    elsewhere. Raises ValueError with the field's name for one that is missing, of another type or out of its bounds."""
    if not isinstance(content, Mapping):
        raise ValueError("it is not an object")
    found = dict(given)
    for name, hint, is_needed in _fields_of(kind):  # type: ignore[arg-type]  # classes are hashable
        if name in given:
            continue
        if name in content:
            found[name] = read_value(hint, content[name], name)
        elif is_needed:
            raise ValueError(f"it has no {name}")
    return kind(**found)


def read_text(kind: type[_T], text: str | bytes, most: int) -> _T:
    """The same from JSON of at most `most` characters. Raises ValueError also for what is not JSON."""
    if len(text) > most:
        raise ValueError(f"it has {len(text)} characters, and not at most {most}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    return read(kind, content)


def load_json(text: str | bytes) -> Any:
    """As `json.loads`, for files that platforms and people write: raises ValueError also for an object with one key
    twice. Which of the two values counts is not known."""

    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"an object has the key {printable(key, 60)!r} twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=without_doubles)


@cache
def _fields_of(kind: Any) -> list[tuple[str, Any, bool]]:
    """Name and type of each field, and whether it has to be there."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        (each.name, hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
        if each.init
    ]


@cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def read_value(hint: Any, value: Any, name: str, bounds: Any = None) -> Any:
    """A value of the type `hint`, as `read` reads the field `name`."""
    if hint is int or hint is float:
        return _number(hint, value, name, bounds)
    if (hint is str or hint is Path) and isinstance(value, str):
        return hint(_text(value, name, bounds or _TEXT))
    if hint is bool and isinstance(value, bool):
        return value
    origin, arguments = _taken_apart(hint)
    if origin is Annotated:
        return read_value(arguments[0], value, name, arguments[1])
    if origin in (Union, UnionType) and NoneType in arguments:
        return None if value is None else read_value(arguments[arguments[0] is NoneType], value, name)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        allowed = {each: each for each in arguments} if origin is Literal else {each.value: each for each in hint}
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"its {name} is none of {', '.join(map(str, allowed))}")
        return allowed[value]
    if isinstance(hint, type) and is_dataclass(hint):
        return read(hint, value)
    if origin is not None:
        return _parts(origin, arguments, value, name)
    raise ValueError(f"its {name} is not {_WORDS.get(hint, hint.__name__)}")


def _parts(origin: Any, arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    """The parts of a tuple, a list or a set (all from a list), or a mapping, whose keys JSON has made texts."""
    if issubclass(origin, Mapping):
        if not isinstance(value, dict) or len(value) > _MOST_PARTS:
            raise ValueError(f"its {name} is not an object")
        return {_key(arguments[0], key, name): read_value(arguments[1], each, name) for key, each in value.items()}
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_PARTS:
        raise ValueError(f"its {name} is not a list")
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise ValueError(f"its {name} has {len(value)} parts instead of {len(arguments)}")
        return tuple(read_value(hint, each, name) for hint, each in zip(arguments, value, strict=True))
    found = [read_value(arguments[0], each, name) for each in value]
    return found if origin is not tuple and issubclass(origin, Sequence) else origin(found)


def _key(hint: Any, key: str, name: str) -> Any:
    if hint is int and key.isascii() and key.isdecimal():
        return _number(int, int(key[:20]), name, None)
    return read_value(hint, key, name)


def _number(kind: type, value: Any, name: str, bounds: Between | None) -> Any:
    bounds = bounds or (_NATURAL if kind is int else _FINITE)
    is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if is_number and bounds.low <= value <= bounds.high:
        return kind(value)
    raise ValueError(f"its {name} is not a {'whole ' * (kind is int)}number from {bounds.low:g} to {bounds.high:g}")


def _text(value: str, name: str, bounds: Text | Words) -> str:
    if isinstance(bounds, Words):
        return printable(value[: bounds.most], bounds.most)
    if len(value) > bounds.most or (bounds.pattern and not re.fullmatch(bounds.pattern, value, re.DOTALL)):
        raise ValueError(f"its {name} {printable(value, 40)!r} is not a valid text of at most {bounds.most} characters")
    return value
