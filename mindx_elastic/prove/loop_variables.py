"""Which variables of a running function go on from step to step, found in its bytecode.

A variable is *carried* by a loop when an iteration binds it and the next one may read that value. The compiler has
left all that this takes in the code object: its instructions, where they jump, and which names they read and bind. No
source is read, so a program from stdin, a notebook or a compiled file is seen as well as any other.

Instructions are nodes of a graph, numbered as they come; a loop is a node that jumps back to one through which every
way to it leads (the *head*). Within the body of one loop, a dataflow from the end of an iteration to its head finds
what is read before it is bound, or bound by some iterations only and read after the loop. Sets of names are bits of
an int. Three things are taken for granted, because programs are written that way: a ``for`` goes round at least once,
``with`` lets exceptions pass, and an exception may come from anywhere inside of a ``try``.

Python 3.10 to 3.14: names are known by their instructions' families (``LOAD_FAST_BORROW`` reads as ``LOAD_FAST``
does), and an instruction of no known family is taken to do nothing to names.
"""

from __future__ import annotations

import dis
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

__all__ = ["Loop", "carried", "loops_around", "rebound_in"]

_MOST_UNITS = 40_000  # of 2 bytes, some 25 a line; so many take 0.2 s, once. A larger function is not looked at
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_NO_FALL_THROUGH = re.compile(r"(RETURN_(VALUE|CONST)|RAISE_VARARGS|RERAISE|JUMP(_FORWARD|_ABSOLUTE|_BACKWARD\w*))$")
_OF_NAMES = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|NAME|GLOBAL|DEREF|CLASSDEREF|FROM_DICT_OR_\w+)")
_PUT_ASIDE = "LOAD_FAST_AND_CLEAR"
"""From 3.12 on a comprehension runs in the function's own code: what has its variable's name is put aside meanwhile."""


class Loop(NamedTuple):
    """A loop that stands in a code object."""

    body: frozenset[int]
    """The numbers of its instructions."""
    carried: frozenset[str]
    """The names that an iteration leaves for the next one."""
    bound: frozenset[str]
    """The names that it binds."""
    targets: frozenset[str]
    """What the ``for`` itself binds."""


class _Code(NamedTuple):
    """The graph of one code object. `after[n]`: the instructions that may come after the one with number n."""

    ops: list[dis.Instruction]
    offsets: list[int]
    lines: list[int]
    after: list[list[int]]
    events: list[list[tuple[str, str]]]
    """``LOAD``, ``STORE`` or ``DELETE`` and the name, in the order in which an instruction does it."""


def carried(frame: FrameType) -> set[str]:
    """The names that an iteration of some loop around `frame` leaves for the next one. Never raises."""
    return {name for loop in loops_around(frame) for name in loop.carried}


def rebound_in(frame: FrameType) -> set[str]:
    """The names that each iteration of the innermost loop around `frame` binds before it reads them: a batch, a loss.
    Whole numbers that a ``for`` counts with are left out: they say where the loop is. Never raises."""
    loops = loops_around(frame)
    if not loops:
        return set()
    counts = {name for name in loops[-1].targets if type(frame.f_locals.get(name)) is int}
    return set(loops[-1].bound - carried(frame) - counts)


def loops_around(frame: FrameType) -> list[Loop]:
    """The loops in which `frame` stands, the outermost first. Any thread; no code of the program runs. Never raises:
    odd code has no loops."""
    try:
        offsets, loops = _loops_of(frame.f_code)
        at = bisect_right(offsets, frame.f_lasti) - 1
        return [loop for loop in loops if at in loop.body]
    except Exception:  # code that was made by hand, or by a Python that is not known yet
        return []


@lru_cache(64)
def _loops_of(code: CodeType) -> tuple[list[int], list[Loop]]:
    """The instructions' offsets, and the loops, outer ones first."""
    if len(code.co_code) > 2 * _MOST_UNITS:
        return [], []
    graph = _read(code)
    _join_tests(graph)
    bodies = _bodies(graph)
    _enter_once(graph, bodies)
    names = sorted({name for events in graph.events for _, name in events})
    bits = {name: 1 << number for number, name in enumerate(names)}
    reads, binds, ends = _effects(graph, bits)
    live = _flow(graph, range(len(graph.ops)), -1, 0, reads, ends)
    loops = []
    for head, body in sorted(bodies.items(), key=lambda item: -len(item[1])):
        after, bound = 0, 0
        for n in body:
            bound |= binds[n]
            for following in graph.after[n]:
                after |= 0 if following in body else live[following]
        needed = _flow(graph, body, head, after, reads, ends)[head] & bound
        goes_on, binds_too = set[str](), set[str]()
        for name, bit in bits.items():
            if bit & needed:
                goes_on.add(name)
            if bit & bound:
                binds_too.add(name)
        loops.append(Loop(frozenset(body), frozenset(goes_on), frozenset(binds_too), _targets(graph, head)))
    return graph.offsets, loops


def _read(code: CodeType) -> _Code:
    bytecode = dis.Bytecode(code)
    ops = [op for op in bytecode if op.opname != "EXTENDED_ARG"]  # a part of the one after it
    offsets = [op.offset for op in ops]
    line_at, line = {}, code.co_firstlineno
    for begin, end, number in code.co_lines():
        line = number or line
        line_at.update(dict.fromkeys(range(begin, end), line))
    # After an exception a ``with`` is taken to raise it again: nothing follows its handler.
    of_with = {n - back for n, op in enumerate(ops) if op.opname == "WITH_EXCEPT_START" for back in range(3)}
    after: list[list[int]] = [[] for _ in ops]
    for n, op in enumerate(ops):
        if n + 1 < len(ops) and not _NO_FALL_THROUGH.match(op.opname):
            after[n].append(n + 1)
        # Before 3.11 what begins a ``try`` jumps to its handler.
        if op.opcode in _JUMPS and (target := bisect_left(offsets, op.argval)) not in of_with:
            after[n].append(target)
    for entry in getattr(bytecode, "exception_entries", ()):  # Python 3.11 and later
        if (target := bisect_left(offsets, entry.target)) not in of_with:
            for n in range(bisect_left(offsets, entry.start), bisect_left(offsets, entry.end)):
                after[n].append(target)
    return _Code(ops, offsets, [line_at.get(offset, line) for offset in offsets], after, _events(ops, offsets))


def _events(ops: list[dis.Instruction], offsets: list[int]) -> list[list[tuple[str, str]]]:
    """What each instruction does to names, without the variables of comprehensions."""
    events: list[list[tuple[str, str]]] = [[] for _ in ops]
    for n, op in enumerate(ops):
        if op.opname != _PUT_ASIDE:
            given = op.argval if type(op.argval) is tuple else (op.argval,)
            events[n] += zip(_OF_NAMES.findall(op.opname), given, strict=False)
    for n, op in enumerate(ops):
        if op.opname == "RERAISE":  # after an exception a comprehension gives the variable its value back
            store = n - 1
            while ops[store].opname.startswith("STORE_FAST"):
                events[store] = []
                store -= 1
    for n, op in enumerate(ops):
        if op.opname == _PUT_ASIDE:
            begin = next((m for m in range(n, len(ops)) if ops[m].opname == "FOR_ITER"), None)
            end = 0 if begin is None else bisect_left(offsets, ops[begin].argval)
            for m in range(n, len(ops)):
                given_back = m >= end and ("STORE", op.argval) in events[m]
                events[m] = [each for each in events[m] if each[1] != op.argval]
                if given_back:
                    break
    return events


def _join_tests(graph: _Code) -> None:
    """The compiler puts a second copy of a ``while``'s test at the end of the body; it jumps to the instruction after
    the first one. Let it jump to the first one, as Python 3.14 does: a test belongs to the iteration that it begins."""
    lines = graph.lines
    for n, following in enumerate(graph.after):
        for head in following[:]:
            if head > n or lines[n] >= lines[head]:
                continue
            copy = n
            while lines[copy - 1] < lines[head] and copy - 1 > head:
                copy -= 1
            of_test, first = set(lines[copy : n + 1]), head
            while first > 0 and lines[first - 1] in of_test:
                first -= 1
            for m in range(copy, n + 1):
                if head in graph.after[m]:
                    graph.after[m][graph.after[m].index(head)] = first


def _bodies(graph: _Code) -> dict[int, set[int]]:
    """By head. A jump back to what can be reached without passing it is none, the end of a handler for one."""
    before: list[list[int]] = [[] for _ in graph.after]
    for n, following in enumerate(graph.after):
        for each in following:
            before[each].append(n)
    bodies: dict[int, set[int]] = {}
    for n, following in enumerate(graph.after):
        for head in following:
            if head <= n:
                body, waiting = {head}, [n]
                while waiting and (head == 0 or 0 not in body):
                    each = waiting.pop()
                    if each not in body:
                        body.add(each)
                        waiting.extend(before[each])
                if head == 0 or 0 not in body:
                    bodies.setdefault(head, set()).update(body)
    return bodies


def _enter_once(graph: _Code, bodies: dict[int, set[int]]) -> None:
    """A ``for`` is entered at its body, so that what it binds is bound after it."""
    for head, body in bodies.items():
        if graph.ops[head].opname == "FOR_ITER":
            for n, following in enumerate(graph.after):
                if n not in body and head in following:
                    following[following.index(head)] = head + 1


def _effects(graph: _Code, bits: dict[str, int]) -> tuple[list[int], list[int], list[int]]:
    """For each instruction: the names that it reads before it binds them, that it binds, and whose value ends there."""
    reads, binds, ends = [0] * len(graph.ops), [0] * len(graph.ops), [0] * len(graph.ops)
    for n, events in enumerate(graph.events):
        for kind, name in events:
            bit = bits[name]
            if kind == "LOAD":
                reads[n] |= bit & ~ends[n]
            else:
                ends[n] |= bit
                binds[n] |= bit if kind == "STORE" else 0
    return reads, binds, ends


def _flow(
    graph: _Code, nodes: Collection[int], head: int, at_end: int, reads: list[int], ends: list[int]
) -> dict[int, int]:
    """The names whose value is still needed in front of each of `nodes`, when those of `at_end` are where `head` comes
    again. Ways that leave `nodes` need none."""
    needed = dict.fromkeys(nodes, 0)
    order, has_changed = sorted(nodes, reverse=True), True
    while has_changed:  # once more for each loop that is inside another one
        has_changed = False
        for n in order:
            later = 0
            for following in graph.after[n]:
                later |= at_end if following == head else needed.get(following, 0)
            now = reads[n] | later & ~ends[n]
            has_changed = has_changed or now != needed[n]
            needed[n] = now
    return needed


def _targets(graph: _Code, head: int) -> frozenset[str]:
    targets: set[str] = set()
    n = head + 1
    while graph.ops[head].opname == "FOR_ITER" and graph.ops[n].opname.startswith(("STORE", "UNPACK")):
        for _, name in graph.events[n]:
            targets.add(name)
        n += 1
    return frozenset(targets)
