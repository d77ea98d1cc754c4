"""Finds local and global variables that go on from step to step and steer the training: ``epsilon *= 0.99``, a count of
steps that sets the learning rate, a running mean that decides what is skipped, a hidden state.

That a value changes is not enough: most such variables are sums and counts for a log. What is told is

- set in the loop around ``step_end()``, which reads it before it sets it: from its own last value, also by way of
  others (``observation = world.step(act(observation))``), or from what a named module gives (``last = loss.item()``),
- not begun from the guard or from an object that the guard keeps, and
- used, itself or by what is worked out from it, in one of these places: ``loss.backward()``, a learning rate, a call
  of a named module, the place in a named tensor that is set (``queue[at] = key``), an argument of ``step(...)`` or of a
  function named like ``adjust_lr``, a test above a step or a break; behind the loop also in what its function returns,
  where the caller does that (a mean of the epoch's losses).

So is the best value so far (``best = max(value, best)``, ``if value < best: best = value``), where it decides what is
saved or copied: a resumed run would take the next value for the best.

A function that is not running at a boundary may do so with a variable that is not its own, too (``global steps_done``).

A count of which only ``count % n`` is used must also differ from its first value in that. All is a risk.

What is only printed (``running_loss += loss.item()``, a meter) is said once, by a new process that resumes in the
middle of an epoch: the training is exact all the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.carried_names import is_carried, variable
from mindx_elastic.guard.checks.changed_in_place import ChangedInPlace
from mindx_elastic.guard.checks.epoch_sums import filled_by_steps, find_epoch_sums, find_steering
from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.loss_reads import line_of_gradients, takes_a_result
from mindx_elastic.guard.checks.rebound import content_of
from mindx_elastic.guard.checks.running_source import Entry, Loop, entry_of, loops_around, spans, tree_of, value_of
from mindx_elastic.guard.checks.source_reads import parents_of, steering_reads
from mindx_elastic.guard.checks.surroundings import is_library, place_of, program_frames
from mindx_elastic.guard.checks.syntax import children, walk
from mindx_elastic.guard.checks.training_words import (
    STEPS,
    counts_on,
    logs,
    name_of,
    names_a_log,
    names_a_setting,
    sets_a_rate,
    trains,
)
from mindx_elastic.guard.unmanaged import ONLY_THE_CHOICE, Unmanaged

__all__ = ["CarriedVariables", "steers"]

_NUMBERS = (int, float, np.number)
_SIMPLE = (*_NUMBERS, torch.Tensor, np.ndarray)
_COPIES = re.compile(r"save|checkpoint|deepcopy|clone|copy|state_dict|export")
_ADDS = ("append", "appendleft", "extend", "add", "push", "insert", "put", "store", "remember")
_LOADS = ("load_state_dict", "copy_", "reset_parameters")


@dataclass
class _Variable:
    name: str
    place: str
    line: int
    moduli: tuple[int, ...]
    """Where only ``count % n`` is used: those n."""
    is_best: bool = False
    """It does not steer the training, but decides what is kept as the best."""
    is_first: bool = False
    """It keeps what the first step has given."""
    is_sum: bool = False
    """The function with the loop begins it and returns what comes of it."""
    file: str = ""
    """Of the line."""
    before: object = None


class CarriedVariables:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged, kept: Iterable[object]) -> None:
        """`kept`: the guard and what it keeps: what is begun from these, modules apart, goes on by itself."""
        self._unmanaged = unmanaged
        self._origins = {id(one) for one in kept if one is not None and not isinstance(one, nn.Module)}
        self._entry: Entry | None = None
        self._variables: list[_Variable] | None = None
        self._told: set[str] = set()
        self._begun: dict[tuple[str, str], Any] = {}
        """By place and name: the numbers in the program's variables in front of its first loop."""
        self._in_place = ChangedInPlace(unmanaged)
        self._resumed_at = 0

    def at_entry(self, frame: FrameType | None, *, resumed_at: int = 0) -> None:
        """Where the program enters the guard's block. `resumed_at`: the steps that its epoch has done before."""
        self._entry, self._variables = entry_of(frame), None
        self._begun = {}
        self._resumed_at = resumed_at

    def at_loop(self, frame: FrameType | None) -> None:
        """A loop begins: with these values a start begins. What its first step changes is seen only against them."""
        if self._variables is not None:
            return
        for place in program_frames(frame):
            for name, value in list(place.f_locals.items()):
                if isinstance(value, _NUMBERS) and not isinstance(value, bool):
                    self._begun[place_of(place), name] = value
            if self._entry is not None and place.f_code is self._entry[0]:
                break

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._in_place.forget()
        self._begun = {}
        for one in self._variables or ():
            one.before = None

    def look(self, frame: FrameType | None, kept: Kept) -> None:
        """At a boundary, which is passed in `frame`."""
        around = loops_around(frame, self._entry) or []
        places = dict(_loops_by_frame(around))
        self._in_place.look(places, kept)
        if self._variables is None:
            for what, remedy in find_epoch_sums(frame, self._entry, kept):
                self._unmanaged.risk(what, remedy)
            found = (_find(place, loops, self._origins, kept) for place, loops in places.items())
            sums = _find_sums(around) if around else ()
            self._variables = list({each.name: each for each in chain(sums, *found)}.values())
            known = {each.name for each in self._variables}
            self._variables += [v for v in _find_in_functions(places) if v.name not in known]
            if self._resumed_at and around:
                self._tell_of_printed(around, kept)
            for one in self._variables:
                if (begun := self._begun.get((one.place, one.name))) is not None:
                    one.before = _in_short(one, begun)
            self._begun = {}
        frames = {place_of(place): place for place in places}
        for one in self._variables:
            place = frames.get(one.place)
            if place is None or one.name in self._told:
                continue
            value = value_of(ast.Name(one.name, ast.Load()), place)
            if one.is_first:
                if (
                    _is_result(value)
                    and not (torch.is_tensor(value) and kept.has(value))
                    and id(value) not in kept.objects
                ):
                    self._told.add(one.name)
                    self._unmanaged.risk(*_words(one, value))
                continue
            if not _is_simple(value):
                value = _in_closure(one.name, place)
            if not _is_simple(value) or (torch.is_tensor(value) and kept.has(value)) or _is_named(value, kept):
                one.before = None
                continue
            now = _in_short(one, value)
            before, one.before = one.before, now
            if before is not None and before != now:
                self._told.add(one.name)
                self._unmanaged.risk(*_words(one, value))

    def _tell_of_printed(self, around: Sequence[tuple[Loop, FrameType]], kept: Kept) -> None:
        """What the steps add up for a print, and no file has."""
        known = {each.name for each in self._variables or ()}
        names = [name for name in dict.fromkeys(_printed_sums(around, self._origins, kept)) if name not in known]
        if names:
            logger.info(
                "what is printed of %s (%s) lacks the steps in front, %d of this epoch: it is no state of the "
                "training, and begins anew where an epoch is resumed in the middle. To have it whole, keep it in a "
                'dict or meter that is made before the guard: Guard(stateful={"sums": sums}, ...)',
                listed(names, 6),
                place_of(around[0][1]),
                self._resumed_at,
            )
        if (call := _enumerated(around[0][0])) is not None:
            what = "%s counts from its start again; guard.enumerate() of the named loader counts on, tqdm around it"
            logger.info(what, call)


def _printed_sums(around: Sequence[tuple[Loop, FrameType]], origins: set[int], kept: Kept) -> Iterator[str]:
    """Numbers that the innermost loop adds to their own last value, and what it fills."""
    steps, place = around[0]
    nodes = [node for statement in steps.body for node in walk(statement)]
    for name in dict.fromkeys(target.id for node in nodes for target in _own_updates(node)):
        value = value_of(ast.Name(name, ast.Load()), place)
        is_number = isinstance(value, (*_NUMBERS, torch.Tensor)) and not isinstance(value, (bool, nn.Parameter))
        if not is_number or (torch.is_tensor(value) and kept.has(value)):
            continue
        if is_carried(steps, variable(name)) and not _is_begun_from(name, place, steps, origins):
            yield name
    for node in nodes:  # self.total += loss.item()
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            value, owner = value_of(node.target, place), value_of(node.target.value, place)
            if isinstance(value, _NUMBERS) and not is_library(type(owner).__module__) and id(owner) not in kept.objects:
                yield ast.unparse(node.target)
    for name, node in filled_by_steps(steps, place, kept).items():
        value = value_of(node, place)
        is_own = isinstance(value, (list, dict)) or not (is_library(type(value).__module__) or _has_weights(value))
        if is_own and find_steering(around, name) is None:
            yield name


def _has_weights(value: Any) -> bool:
    """An average of the model (``model_ema.update(model)``): other checks look at it."""
    return any(isinstance(each, (nn.Module, nn.Parameter)) for each in attributes_of(value).values())


def _enumerated(steps: Loop) -> str | None:
    """The ``enumerate(loader)`` whose numbers the resumed part of an epoch begins with again."""
    call = steps.iter if isinstance(steps, ast.For) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "enumerate":
        return None
    return None if counts_on(call) else ast.unparse(call)


def _in_short(one: _Variable, value: Any) -> object:
    return content_of(value) if not one.moduli else repr([value % n for n in one.moduli])


def _in_closure(name: str, frame: FrameType) -> Any:
    """The variable of a function around one that the program has a variable for; None: there is none."""
    for variables in (frame.f_locals, frame.f_globals):
        for function in list(variables.values()):
            if isinstance(function, FunctionType) and name in function.__code__.co_freevars:
                cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
                with suppress(ValueError):  # it has no value yet
                    return cell.cell_contents
    return None


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return 0 < len(value) < 100 and all(isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, _SIMPLE) and not isinstance(value, (bool, nn.Parameter))


def _is_result(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return 0 < len(value) < 100 and all(map(_is_result, value))
    return _is_simple(value)


def _is_named(value: Any, kept: Kept) -> bool:
    return isinstance(value, (np.ndarray, list)) and id(value) in kept.objects


def _loops_by_frame(around: Sequence[tuple[Loop, FrameType]]) -> Iterator[tuple[FrameType, list[Loop]]]:
    """The functions that run inside of the block with the loops in them that do, the innermost first."""
    found: dict[FrameType, list[Loop]] = {}
    for loop, place in around:
        found.setdefault(place, []).append(loop)
    yield from found.items()


def _find(frame: FrameType, loops: list[Loop], origins: set[int], kept: Kept) -> Iterator[_Variable]:
    outer = loops[-1]
    nodes = list(walk(outer))
    tree = tree_of(frame)
    for name in sorted({name for node in nodes for name in _first_in(node)}):
        if any(is_carried(loop, variable(name)) for loop in loops) and tree is not None:
            line = _sink(outer, name, frame, kept.objects) or line_of_gradients(tree, variable(name))
            if line is not None:
                yield _Variable(name, place_of(frame), line, (), is_first=True)
    best = {name for node in nodes for name in _best_in(node)}
    names = {target.id: None for node in nodes for target in _own_updates(node)}
    names |= dict.fromkeys([*sorted(best), *_that_follow_the_training(nodes, frame, kept.objects)])
    for name in names:
        is_it = _other_than_logged(name, nodes)
        if not any(is_carried(loop, is_it) for loop in loops) or _is_begun_from(name, frame, outer, origins):
            continue
        line = _sink(outer, name, frame, kept.objects)
        if line is None and name in best and (line := _saves(outer, name)) is not None:
            yield _Variable(name, place_of(frame), line, (), is_best=True)
        elif line is not None:
            yield _Variable(name, place_of(frame), line, _moduli(nodes, name, frame))


def _find_sums(around: Sequence[tuple[Loop, FrameType]]) -> Iterator[_Variable]:
    """What the first loop adds up in a function that returns what comes of it, where the caller steers by that."""
    loop, place = around[0]
    if any(where is place for _, where in around[1:]) or len(around) < 2:
        return  # a loop around it is in the same function, where `_find` looks
    nodes = [node for statement in loop.body for node in walk(statement)]
    for name in dict.fromkeys(target.id for node in nodes for target in _own_updates(node)):
        if is_carried(loop, _other_than_logged(name, nodes)) and (found := find_steering(around, name)) is not None:
            line, where = found
            yield _Variable(name, place_of(place), line, (), is_sum=True, file=Path(where.f_code.co_filename).name)


def _other_than_logged(name: str, nodes: list[ast.AST]) -> Callable[[ast.AST], bool]:
    """Accepts the variable, but where it is only printed or logged."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and logs(node)]
    logged = {id(part) for call in calls for part in walk(call)}
    is_it = variable(name)
    return lambda node: id(node) not in logged and is_it(node)


def _find_in_functions(places: Iterable[FrameType]) -> Iterator[_Variable]:
    """Variables of other functions or the module that a function sets from their last value, and not only for a log."""
    seen: set[str] = set()
    for frame in places:
        file, tree = frame.f_code.co_filename, tree_of(frame)
        if tree is None or file in seen:
            continue
        seen.add(file)
        parents: dict[int, ast.AST] | None = None
        for function in (node for node in walk(tree) if isinstance(node, ast.FunctionDef)):
            nodes = list(walk(function))
            own = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
            if not own:
                continue
            parents = parents or parents_of(tree)
            updates = [(node, target.id) for node in nodes for target in _own_updates(node) if target.id in own]
            for name in dict.fromkeys(name for _, name in updates):
                inside = {id(part) for node, its in updates if its == name for part in walk(node)}
                reads = [n for n in steering_reads(tree, variable(name), parents) if id(n) not in inside]
                if reads:
                    yield _Variable(name, place_of(frame), min(n.lineno for n in reads), ())
            for name in sorted({name for node in nodes for name in _best_in(node)} & own):
                if (line := _saves(function, name)) is not None:
                    yield _Variable(name, place_of(frame), line, (), is_best=True)


def _that_follow_the_training(nodes: list[ast.AST], frame: FrameType, kept: set[int]) -> Iterator[str]:
    """The variables that are set from what follows from themselves, or from what a named module gives."""
    assigns = [
        ({each.id for each in _targets(target)}, value)
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target, value in _pairs(node)
    ]
    flows = [(sets, _reads(value)) for sets, value in assigns]
    given = {
        name
        for sets, assigned in assigns
        for call in walk(assigned)
        if isinstance(call, ast.Call)
        and isinstance(value := value_of(call.func, frame), nn.Module)
        and id(value) in kept
        for name in sets
    }
    of_modules = _reached(given, flows)
    for name in dict.fromkeys(name for sets, _ in flows for name in sorted(sets)):
        own = _reached({name}, flows)
        if any(name in sets and reads & (own | of_modules) for sets, reads in flows):
            yield name


def _reached(names: set[str], flows: list[tuple[set[str], set[str]]]) -> set[str]:
    """What is worked out from `names`, and they."""
    found, before = set(names), -1
    while len(found) != before:
        before = len(found)
        for sets, reads in flows:
            if reads & found:
                found |= sets
    return found


def _own_updates(node: ast.AST) -> list[ast.Name]:
    """The variables that a statement sets from their own last value."""
    if isinstance(node, ast.AugAssign):
        return [node.target] if isinstance(node.target, ast.Name) else []
    if not isinstance(node, ast.Assign):
        return []
    return [each for one, value in _pairs(node) for each in _targets(one) if each.id in _reads(value)]


def _pairs(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What an assignment sets, each with its value."""
    if node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # batch, following = following, fetch()
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _best_in(node: ast.AST) -> Iterator[str]:
    """The variable of ``best = max(value, best)``, or of ``if value < best: best = value``."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and name_of(node.value.func) in ("max", "min"):
        given = {name for part in node.value.args for name in _reads(part)}
        yield from (each.id for target in node.targets for each in _targets(target) if each.id in given)
    elif isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
        assigns = [statement for statement in node.body if isinstance(statement, ast.Assign)]
        sets = {each.id for one in assigns for target in one.targets for each in _targets(target)}
        yield from sets & _reads(node.test)


def _first_in(node: ast.AST) -> Iterator[str]:
    """The variable of ``if first is None: first = loss.detach()``."""
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return
    if not isinstance(node.test.left, ast.Name) or not isinstance(node.test.ops[0], ast.Is):
        return
    for statement in node.body:
        if isinstance(statement, ast.Assign) and takes_a_result(statement.value):
            names = {each.id for target in statement.targets for each in _targets(target)}
            yield from names & {node.test.left.id}


def _saves(outer: Loop | ast.FunctionDef, name: str) -> int | None:
    """The line in which it decides what is saved or copied."""
    nodes = [node for statement in outer.body for node in walk(statement)]
    flags = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Compare) and name in _reads(node.value)
        for one in node.targets
        for target in _targets(one)
    }
    lines = []
    for node in nodes:
        if isinstance(node, ast.If) and _reads(node.test) & {name, *flags}:
            inner = [each for statement in node.body for each in walk(statement)]
            lines += [n.lineno for n in inner if isinstance(n, ast.Call) and _COPIES.search(name_of(n.func))]
        elif isinstance(node, ast.Call) and _COPIES.search(name_of(node.func)):
            given = (name for part in (*node.args, *node.keywords) for name in _reads(part))
            lines += [node.lineno] if flags & set(given) else []
    return min(lines, default=None)


def _targets(node: ast.AST) -> Iterator[ast.Name]:
    if isinstance(node, (ast.Tuple, ast.List)):
        for element in node.elts:
            yield from _targets(element)
    elif isinstance(node, ast.Starred):
        yield from _targets(node.value)
    elif isinstance(node, ast.Name):
        yield node


def _reads(node: ast.AST) -> set[str]:
    """The variables that an expression reads, without what it only logs and the length of things."""
    if isinstance(node, ast.Call) and (
        names_a_log(name_of(node.func)) or name_of(node.func) in ("len", "time", "isinstance")
    ):
        return set()
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    return {name for child in children(node) for name in _reads(child)}


def _is_begun_from(name: str, frame: FrameType, outer: Loop, origins: set[int]) -> bool:
    """Whether a statement sets it from one of `origins`."""
    inside = {id(node) for node in walk(outer)}
    for node in _function(frame):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            continue
        for target, value in _pairs(node):
            if not any(each.id == name for each in _targets(target)):
                continue
            if id(node) in inside and name in _reads(value):
                continue
            begins_anew = {  # observation = world.reset(), where `world` is kept
                id(part)
                for call in walk(value)
                if isinstance(call, ast.Call) and "reset" in name_of(call.func)
                for part in walk(call.func)
            }
            for part in walk(value):
                if not isinstance(part, (ast.Name, ast.Attribute)) or id(part) in begins_anew:
                    continue
                if id(value_of(part, frame)) in origins:
                    return True
    return False


def _function(frame: FrameType) -> list[ast.AST]:
    """The nodes of the running function."""
    tree = tree_of(frame)
    nodes = [] if tree is None else list(walk(tree))
    name, line = frame.f_code.co_name, frame.f_lineno
    own = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name and spans(n, line)]
    return list(walk(own[-1])) if own else nodes


def _sink(outer: Loop, name: str, frame: FrameType, kept: set[int]) -> int | None:
    """The line in which it steers the training."""
    nodes = [node for statement in outer.body for node in walk(statement)]
    tainted: set[str] = {name}
    before: set[str] = set()
    while tainted != before:
        before = set(tainted)
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _reads(node.value) & tainted:
                    tainted |= {each.id for target in targets for each in _targets(target)}
            elif isinstance(node, ast.Call) and name_of(node.func) in _ADDS and isinstance(node.func, ast.Attribute):
                if any(_reads(part) & tainted for part in node.args):
                    tainted |= _reads(node.func.value)
            elif isinstance(node, ast.If) and _reads(node.test) & tainted:
                inner = [each for statement in (*node.body, *node.orelse) for each in walk(statement)]
                assigns = [each for each in inner if isinstance(each, ast.Assign)]
                tainted |= {each.id for node in assigns for target in node.targets for each in _targets(target)}
    code = (node for node in nodes if isinstance(node, (ast.stmt, ast.expr)))
    counts = _only_counts(nodes, name)
    return min((n.lineno for n in code if _is_sink(n, tainted, frame, kept, counts=counts)), default=None)


def steers(outer: Loop, name: str, frame: FrameType, kept: Kept) -> bool:
    """Whether a variable of the function in `frame` steers the training in `outer`."""
    return _sink(outer, name, frame, kept.objects) is not None


def _only_counts(nodes: list[ast.AST], name: str) -> bool:
    """Whether ``count += 1`` is all that is done to it."""
    sets = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)]
    adds = [
        node.target
        for node in nodes
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant)
    ]
    return all(any(one is target for target in adds) for one in sets)


def _leaves(statement: ast.stmt) -> bool:
    """``if count >= total: break`` may agree with the end of the loops around it: `prove` tells."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and names_a_log(name_of(statement.value.func))
    return isinstance(statement, (ast.Break, ast.Return))


def _is_sink(
    node: ast.stmt | ast.expr, tainted: set[str], frame: FrameType, kept: set[int], *, counts: bool = False
) -> bool:
    if isinstance(node, (ast.If, ast.While)):
        only_ends = counts and (isinstance(node, ast.While) or all(map(_leaves, node.body)))
        if only_ends or not _reads(node.test) & tainted:
            return False
        return any(trains(statement) or _loads(statement) for statement in node.body)
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(_is_place_in_kept(target, tainted, frame, kept) for target in targets):
            return True
        return sets_a_rate(node) and bool(_reads(node.value) & tainted)
    if not isinstance(node, ast.Call):
        return False
    called = name_of(node.func)
    given = {name for part in (*node.args, *node.keywords) for name in _reads(part)} & tainted
    if called == "backward":
        return isinstance(node.func, ast.Attribute) and bool((_reads(node.func.value) | given) & tainted)
    if not given or names_a_log(called):
        return False
    if called in STEPS or names_a_setting(called):
        return True
    value = value_of(node.func, frame)
    return isinstance(value, nn.Module) and id(value) in kept


def _is_place_in_kept(target: ast.expr, tainted: set[str], frame: FrameType, kept: set[int]) -> bool:
    """``queue[at : at + n] = keys`` where the queue is named: it says what the queue's next places are."""
    if not isinstance(target, ast.Subscript) or not _reads(target.slice) & tainted:
        return False
    value = value_of(target.value, frame)
    return isinstance(value, (torch.Tensor, np.ndarray, list)) and id(value) in kept


def _loads(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) and name_of(node.func) in _LOADS for node in walk(statement))


def _moduli(nodes: list[ast.AST], name: str, frame: FrameType) -> tuple[int, ...]:
    """The n of ``name % n`` where nothing else of it is used; a test of another kind, or an n not known: none."""
    own = {id(part) for node in nodes if _own_updates(node) for part in walk(node)}
    logged = {
        id(part)
        for node in nodes
        if isinstance(node, ast.Call) and names_a_log(name_of(node.func))
        for part in walk(node)
    }
    reads = {id(node) for node in nodes if isinstance(node, ast.Name) and node.id == name} - own - logged
    found: list[int] = []
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            inside = {id(part) for part in walk(node.left)} & reads
            by = node.right.value if isinstance(node.right, ast.Constant) else value_of(node.right, frame)
            if inside and type(by) is int and by > 0:
                reads -= inside
                found.append(by)
    return tuple(found) if not reads else ()


def _words(one: _Variable, value: Any) -> tuple[str, str]:
    name, file = one.name, one.file or Path(one.place.rpartition(" in ")[2]).name
    if one.is_first:
        what = f"the variable {name} ({one.place}) keeps what the first step has given, steers the training in line "
        what += f"{one.line} of {file}, and is not kept: a resumed run takes what its own first step gives"
        state = f'state = {{"{name}": None}} before the guard, Guard(stateful={{"state": state}}, ...)'
        return what, f'Keep it in a dict: {state}, and state["{name}"] in its place'
    what = f"the variable {name} ({one.place}) goes on from step to step, steers the training in line {one.line} of "
    what += f"{file}, and is not kept"
    if one.is_best:
        what = (
            f"the variable {name} ({one.place}) decides in line {one.line} of {file} what is saved as the best, and is "
        )
        what += f"not kept: in a resumed run {ONLY_THE_CHOICE}"
    if one.is_sum:
        what = f"the variable {name} ({one.place}) adds up over the steps of an epoch, steers the training in line "
        what += (
            f"{one.line} of {file}, and is not kept: an epoch that is resumed in the middle begins with an empty one"
        )
        state = f'state = {{"{name}": 0.0}} before the guard, Guard(stateful={{"state": state}}, ...)'
        return what, f'Keep it in a dict: {state}, state["{name}"] in its place, set to 0 at the epoch\'s beginning'
    state = f'state = {{"{name}": {name}}} before the guard, Guard(stateful={{"state": state}}, ...)'
    other = (
        ""
        if one.is_best or isinstance(value, (list, tuple, torch.Tensor, np.ndarray))
        else "; or work it out from guard.step"
    )
    return what, f'Keep it in a dict: {state}, and state["{name}"] in its place{other}'
