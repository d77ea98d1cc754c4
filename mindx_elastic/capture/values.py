"""Values that a checkpoint has no word for: what stands for them in it is plain data with the name of their class.

* an enumeration, a named tuple, a dataclass
* an object of any other class of Python code that has nothing but tensors and plain data (GaLore's projector): its
  attributes
* a tensor of one of the `_TENSORS` (the 8-bit state of an optimizer): the plain tensors that it is made of
* a parameter as a key: the parameter's name
* a class (heavyball has its own in its groups): its name

`originals` makes the values again, as new ones. For what programs keep in a loop (lists, dicts, deques, counters,
tensors, generators, and objects of them) `snapshot` copies a value into what a checkpoint can hold, and `put_back`
makes the live value equal to it again, in place as far as that goes, because the program has other references to it.
There a tensor on a device and a random generator have stand-ins, too.

A file names a class and never says what to run: the class is looked up among those
that are imported, its instance is made without a call of ``__init__``, and only the classes of the list above, which
have their own way to be put together, are called.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from abc import ABC, ABCMeta
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from operator import is_
from typing import Any, Generic

import numpy as np
import torch

from mindx_elastic.capture.dtensors import filled
from mindx_elastic.capture.generators import GENERATORS, generator_adapter, with_state
from mindx_elastic.capture.nested import ATOMS, are_in_use, devices_of, put_on
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.errors import MismatchError, UnsupportedStateError

__all__ = [
    "GENERATOR",
    "MARK",
    "check_objects",
    "is_plain_class",
    "named_keys",
    "original_keys",
    "originals",
    "put_back",
    "snapshot",
    "stand_in",
]

MARK = "__mindx_class__"
"""The key that says that a dict stands for another value."""
_PARAMETER = "__mindx_parameter__"
"""Begins the tuple that stands for a parameter where it is a key; its name follows."""
_TENSORS = frozenset(
    (
        "torchao.optim.subclass_8bit:OptimState8bit",
        "torchao.optim.subclass_4bit:OptimState4bit",
        "torchao.optim.subclass_fp8:OptimStateFp8",
    )
)
"""Classes of tensors made of others, with ``__tensor_flatten__`` and ``__tensor_unflatten__``."""
_TENSOR_DICT = "tensordict._td:TensorDict"
_TENSOR, GENERATOR = "torch.Tensor", "generator"
"""The classes that the stand-ins of `snapshot` name for a tensor on a device and for a random generator."""
_DEEPEST, _DEEPEST_SNAPSHOT = 8, 60
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: made by Python code
_OWN_WAYS = frozenset(
    """__reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs__ __getnewargs_ex__ __setattr__ __getattribute__
    __del__ __next__ __enter__""".split()  # noqa: SIM905
)
"""An object that has one of these is more than its attributes."""
_CONTAINERS = frozenset((list, tuple, deque, set, frozenset, dict, OrderedDict))
_DENSE = (torch.Tensor, torch.nn.Parameter)
_plain_classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def stand_in(value: Any, part: Callable[[Any], Any], also: tuple[type, ...] = ()) -> Any:
    """What stands for `value`, each of its parts as `part` gives it; `value` itself where nothing can.

    `also`: classes that `part` knows, and that may be in an object besides tensors and plain data.
    """
    kind = type(value)
    path = _path(kind)
    if issubclass(kind, torch.Tensor):
        if path not in _TENSORS:
            return value
        names, context = value.__tensor_flatten__()
        tensors = part({name: getattr(value, name) for name in names})
        return {MARK: path, "tensors": tensors, "context": part(context), "shape": value.shape}
    if kind in (type, ABCMeta):
        is_found = "<locals>" not in value.__qualname__ and not _is_of_python(value.__module__)
        return {MARK: "builtins:type", "path": _path(value)} if is_found else value
    if issubclass(kind, Enum):
        return {MARK: path, "name": attributes_of(value)["_name_"]}
    if issubclass(kind, tuple):
        return {MARK: path, "values": part(tuple(value))} if hasattr(kind, "_fields") else value
    if path == _TENSOR_DICT:
        return {MARK: path, "state": part(value.state_dict())}
    key = "fields" if dataclasses.is_dataclass(kind) else "attributes"
    if key == "attributes" and not (is_plain_class(kind) and _has_plain_data_only(value, 0, also)):
        return value
    attributes = attributes_of(value)
    made = {MARK: path, key: part(attributes)}
    if are_in_use() and (devices := devices_of(attributes, None)):
        made["devices"] = devices
    return made


def named_keys(value: Any, names: Mapping[int, str]) -> Any:
    """`value` with the name in place of each parameter that is the key of a dict in it. `names`: by id. Containers
    without any are the same objects."""
    return _with_keys(value, lambda key: _named(key, names))


def original_keys(value: Any, parameters: Mapping[str, torch.Tensor]) -> Any:
    """What `named_keys` was given. Raises MismatchError for a parameter that the program does not have."""
    return _with_keys(value, lambda key: _parameter(key, parameters))


def _with_keys(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change`: of a key that is not a plain value. No call for what most keys and items are."""
    kind = type(value)
    if kind in (list, tuple):
        if ATOMS.issuperset(map(type, value)):
            return value
        items = [_with_keys(item, change) for item in value]
        return value if all(map(is_, items, value)) else kind(items)
    if not issubclass(kind, dict):
        return value
    pairs, is_same = [], True
    for key, item in value.items():
        new_key = key if type(key) in ATOMS else change(key)
        new_item = item if type(item) in ATOMS else _with_keys(item, change)
        is_same = is_same and new_key is key and new_item is item
        pairs.append((new_key, new_item))
    if is_same:
        return value
    return OrderedDict(pairs) if kind is OrderedDict else dict(pairs)


def _named(key: Any, names: Mapping[int, str]) -> Any:
    return (_PARAMETER, names[id(key)]) if isinstance(key, torch.Tensor) and id(key) in names else key


def originals(
    value: Any, parameters: Mapping[str, torch.Tensor] | None = None, device: torch.device | None = None
) -> Any:
    """`value` with the original in place of each stand-in, in new containers; tensors next to them are the same.

    `parameters`: for those that were keys, by name. `device`: where the tensors of objects go that were on a device.
    Raises MismatchError for a class or a parameter that the program does not have.
    """
    kind = type(value)
    if kind is dict and MARK in value:
        return _original(value, lambda _, part, name: originals(part, parameters, device), device)
    if issubclass(kind, dict):
        made = value.copy()
        made.clear()
        for key, item in value.items():
            made[_parameter(key, parameters)] = originals(item, parameters, device)
        if (metadata := attributes_of(value).get("_metadata")) is not None:
            made._metadata = originals(metadata, parameters, device)
        return made
    if kind in (list, tuple):
        return kind([originals(item, parameters, device) for item in value])
    if kind is deque:
        return deque([originals(item, parameters, device) for item in value], value.maxlen)
    return value


def _parameter(key: Any, parameters: Mapping[str, torch.Tensor] | None) -> Any:
    if type(key) is not tuple or len(key) != 2 or key[0] != _PARAMETER:
        return key
    if parameters is None or key[1] not in parameters:
        raise MismatchError(f"the checkpoint holds something for the parameter {key[1]}, which this program lacks")
    return parameters[key[1]]


def _original(
    saved: Mapping[str, Any],
    part: Callable[[Any, Any, str], Any],
    device: torch.device | None,
    live: Any = None,
    place: str = "the state",
) -> Any:
    """`part`: makes a part of the value, of what there is now, what was saved, and its name."""
    kind: Any = _class_of(saved[MARK], place)
    if "tensors" in saved and saved[MARK] in _TENSORS:
        stride = torch.empty(saved["shape"], device="meta").stride()
        return kind.__tensor_unflatten__(saved["tensors"], saved["context"], saved["shape"], stride)
    if saved[MARK] == _TENSOR_DICT and "state" in saved:
        return kind({}, []).load_state_dict(part(None, saved["state"], "state"), assign=True)
    if kind is type and not _is_of_python(saved.get("path", "builtins")):
        return _class_of(saved["path"], place)
    if issubclass(kind, Enum) and "name" in saved:
        return kind[saved["name"]]
    if issubclass(kind, tuple) and "values" in saved:
        return tuple.__new__(kind, part(live if type(live) is kind else None, saved["values"], "values"))
    fields = put_on(_fields_of(saved, kind, place), _types(saved.get("devices", "")), device)
    made = live if type(live) is kind else object.__new__(kind)
    now = attributes_of(made)
    for name, item in fields.items():
        object.__setattr__(made, name, part(now.get(name), item, name))
    return made


def _types(devices: str | list[str]) -> str | list[str]:
    """Without their numbers, which may be others in this process."""
    return devices.partition(":")[0] if isinstance(devices, str) else [name.partition(":")[0] for name in devices]


def _fields_of(saved: Mapping[str, Any], kind: type, place: str) -> dict[str, Any]:
    """The attributes of a stand-in for a `kind`. Raises MismatchError where a stand-in for such a class has none."""
    known = {"fields"} if dataclasses.is_dataclass(kind) else {"attributes"} if is_plain_class(kind) else set()
    for name in known & saved.keys():
        return dict(saved[name])
    raise MismatchError(f"{place}: {saved[MARK]} is another kind of class than in the run that wrote the checkpoint")


def _class_of(path: str, place: str) -> type:
    """The class that a stand-in names. Raises MismatchError where the program has not imported it."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for step in name.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type):
        raise MismatchError(
            f"{place}: the checkpoint holds a {path.replace(':', '.')}, and this program has no such class yet; import "
            "or define it, at the top level of a module, before the guard is entered"
        )
    return found


def is_plain_class(kind: type) -> bool:
    """Whether its instances are nothing but their attributes, as far as the class says."""
    known = _plain_classes.get(kind)
    if known is None:
        known = _plain_classes[kind] = _is_plain_class(kind)
    return known


def _is_plain_class(kind: type) -> bool:
    if type(kind) not in (type, ABCMeta) or "<locals>" in kind.__qualname__ or kind is object:
        return False
    for each in kind.__mro__:
        if each in (object, ABC, Generic):
            continue
        root = each.__module__.partition(".")[0]
        if not each.__flags__ & _HEAP_TYPE or _is_of_python(root) or root in ("torch", "numpy"):
            return False
        if not _OWN_WAYS.isdisjoint(each.__dict__):
            return False
    return True


def _is_of_python(module: str) -> bool:
    root = module.partition(":")[0].partition(".")[0]
    return root in sys.stdlib_module_names and root != "__main__"


def _has_plain_data_only(value: Any, depth: int, also: tuple[type, ...]) -> bool:
    kind = type(value)
    if kind in ATOMS:
        return True
    if depth > _DEEPEST:
        return False
    if kind in (torch.Tensor, np.ndarray):
        return True
    if kind in (dict, OrderedDict):
        return all(_has_plain_data_only(item, depth + 1, also) for pair in value.items() for item in pair)
    if kind in _CONTAINERS:
        return all(_has_plain_data_only(item, depth + 1, also) for item in value)
    if issubclass(kind, (np.generic, *also)):
        return True
    if not is_plain_class(kind):
        return False
    return all(_has_plain_data_only(item, depth + 1, also) for item in attributes_of(value).values())


def check_objects(state: Any, place: str, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedStateError for an object in `state`, as the program gives it, that has more than tensors and
    plain data, that would come back as several, or whose tensor would come back apart from the parameter that it is.

    `parameters`: of the job, by name.
    """
    at = {p.data_ptr(): name for name, p in parameters.items() if type(p) in _DENSE and p.numel()}
    owners: dict[int, str] = {}
    for where, value, owner in _parts(state, place, "", 0):
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            is_dense = owner and kind in _DENSE and value.layout is torch.strided and value.numel()
            if is_dense and (name := at.get(value.data_ptr())) is not None:
                problem = f"it is the parameter {name} itself, and a copy would come back; keep its name in the {owner}"
                raise UnsupportedStateError(where, problem)
        elif owner and not _is_storable(kind):
            problem = f"a {kind.__qualname__}, where a {owner} may have only tensors and plain data; leave it out of it"
            raise UnsupportedStateError(where, problem)
        elif is_plain_class(kind) and owners.setdefault(id(value), where) != where:
            problem = f"the same {kind.__qualname__} as {owners[id(value)]}, and two would come back; make one for each"
            raise UnsupportedStateError(where, problem)


def _parts(value: Any, place: str, owner: str, depth: int) -> Iterator[tuple[str, Any, str]]:
    """Place and value of all that is not a plain value, and the class of the object that has it, if it is one that is
    stored by its attributes."""
    kind = type(value)
    if kind in ATOMS or depth > 4 * _DEEPEST:
        return
    yield place, value, owner
    items: Any = ()
    if issubclass(kind, dict):
        items = value.items()
    elif kind in (list, tuple, deque):
        items = enumerate(value)
    elif is_plain_class(kind) and not issubclass(kind, Enum):
        items, owner = attributes_of(value).items(), kind.__qualname__
    for key, item in items:
        if type(item) not in ATOMS:
            yield from _parts(item, f"{place}.{key}" if type(key) in (str, int) else place, owner, depth + 1)


def _is_storable(kind: type) -> bool:
    return kind in _CONTAINERS or issubclass(kind, (np.ndarray, np.generic)) or is_plain_class(kind)


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# --- what programs keep in a loop ---


def snapshot(value: Any, place: str, depth: int = 0) -> Any:
    """A copy of `value` that a checkpoint can hold and that shares nothing mutable with it.

    Raises UnsupportedStateError, which names the `place`, for what could not be put back.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if depth > _DEEPEST_SNAPSHOT:
        raise UnsupportedStateError(place, f"nested deeper than {_DEEPEST_SNAPSHOT} levels, or it contains itself")
    if kind in (list, tuple, deque, set, frozenset):
        if ATOMS.issuperset(map(type, value)):  # numbers, in a tenth of the time
            return value if kind in (tuple, frozenset) else value.copy()
        items = [snapshot(item, f"{place}.{number}", depth + 1) for number, item in enumerate(value)]
        return deque(items, value.maxlen) if kind is deque else items if kind is list else kind(items)
    if kind in (dict, OrderedDict, defaultdict, Counter):
        if MARK in value:
            raise UnsupportedStateError(place, f"the key {MARK!r} is taken")
        pairs = ((key, snapshot(item, f"{place}.{key}", depth + 1)) for key, item in value.items())
        if kind is not OrderedDict:
            return Counter(dict(pairs)) if kind is Counter else dict(pairs)
        copied = OrderedDict(pairs)
        if (metadata := vars(value).get("_metadata")) is not None:
            copied._metadata = snapshot(metadata, f"{place}._metadata", depth + 1)  # type: ignore[attr-defined]
        return copied
    if kind.__module__ == "numpy":
        return value.copy() if hasattr(value, "dtype") else value  # arrays and scalars
    if issubclass(kind, GENERATORS) and (generator := generator_adapter(place, value)) is not None:
        return {MARK: GENERATOR, "state": snapshot(generator.state_dict(), place, depth + 1)}
    known = stand_in(value, lambda part: snapshot(part, place, depth + 1), also=GENERATORS)
    if known is not value:
        return known
    if issubclass(kind, torch.Tensor):
        return _tensor(value)
    raise UnsupportedStateError(
        place,
        f"a {kind.__module__}.{kind.__qualname__} cannot be kept here; use numbers, strings, tensors, arrays, lists, "
        "tuples, dicts, sets, deques, named tuples, dataclasses, random generators and objects that have only these, "
        "or name the object itself in stateful=",
    )


def put_back(live: Any, saved: Any, place: str) -> Any:
    """`saved` as the live value: `live` itself, changed in place, where it is of the same type; else a new value."""
    if isinstance(saved, dict) and MARK in saved:
        return _of_stand_in(live, saved, place)
    kind = type(saved)
    if kind is list and type(live) is list:
        live[:] = _items(live, saved, place)
        return live
    if kind is deque:
        items = _items(live, saved, place)
        if type(live) is deque and live.maxlen == saved.maxlen:
            live.clear()
            live.extend(items)
            return live
        return deque(items, saved.maxlen)
    if kind in (dict, OrderedDict, Counter):
        pairs = {key: put_back(_get(live, key), item, f"{place}.{key}") for key, item in saved.items()}
        if isinstance(live, dict):
            live.clear()
            live.update(pairs)  # in the saved order
            made = live
        else:
            made = kind(pairs)
        if kind is OrderedDict and isinstance(made, OrderedDict) and "_metadata" in vars(saved):
            made._metadata = put_back(None, vars(saved)["_metadata"], place)  # type: ignore[attr-defined]
        return made
    if kind is set and type(live) is set:
        live.clear()
        live.update(_items(None, saved, place))
        return live
    if kind in (list, tuple, set, frozenset):
        return kind(_items(live if kind is tuple else None, saved, place))
    if isinstance(saved, torch.Tensor):
        return filled(live, saved)
    if hasattr(saved, "dtype") and kind.__module__ == "numpy":
        alike = type(live) is kind and live.ndim > 0 and (live.shape, live.dtype) == (saved.shape, saved.dtype)
        if alike and live.flags.writeable:
            live[...] = saved
            return live
        return saved.copy()
    return saved


def _items(live: Any, saved: Any, place: str) -> list[Any]:
    """The items, in place where both have the same number of them (a list of tensors)."""
    alike = isinstance(live, (list, tuple, deque)) and len(live) == len(saved)
    now = list(live) if alike else [None] * len(saved)
    return [put_back(old, new, f"{place}.{number}") for number, (old, new) in enumerate(zip(now, saved, strict=True))]


def _get(live: Any, key: Any) -> Any:
    return live[key] if isinstance(live, dict) and key in live else None


def _tensor(value: torch.Tensor) -> Any:
    copy = value.detach().clone()
    if value.device.type == "cpu" and not value.requires_grad:
        return copy
    mark = {MARK: _TENSOR, "value": copy, "device": str(value.device), "grad": value.requires_grad}
    return {**mark, "parameter": isinstance(value, torch.nn.Parameter)}


def _of_stand_in(live: Any, saved: Mapping[str, Any], place: str) -> Any:
    if saved[MARK] == _TENSOR:
        tensor = filled(live, saved["value"], torch.device(saved["device"]))
        if tensor is live:
            return live
        if saved["parameter"]:
            return torch.nn.Parameter(tensor, requires_grad=saved["grad"])
        return tensor.requires_grad_(saved["grad"])
    if saved[MARK] == GENERATOR:
        return with_state(live, saved["state"], place)
    return _original(saved, lambda now, part, name: put_back(now, part, f"{place}.{name}"), None, live, place)
