"""Names that go on from step to step: each loop of the table says in its last line which ones there are.

Each loop runs as a function and at the top of a module, whose names the compiler treats in another way.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.prove.loop_variables import carried, rebound_in

LOOPS = """
# a batch is fetched ahead, inside of an accumulation
inputs, labels = fetch(), fetch()
lowest, number, shown = 1e9, 0, 0.0
while True:
    rate = number * 0.1
    if number % 2 == 0:
        value = evaluate()
        if value < lowest:
            lowest = value
    for part in range(2):
        loss = model(inputs, labels, rate)
        inputs, labels = fetch(), fetch()
    boundary()
    if number % 2 == 1:
        print(loss, shown)
    number += 1
    if number > 2:
        break
# inputs labels lowest number

# nothing
for epoch in range(2):
    for batch in loader():
        loss = model(batch)
        boundary()
    print(epoch, loss, evaluate())
#

# sums, counts, best value, patience; a list goes on as an object, not as a name
best, bad, history, count = 0.0, 0, [], 0
for epoch in range(2):
    total = 0.0
    for i, batch in enumerate(loader()):
        total += model(batch)
        count += 1
        boundary()
        if i % 2 == 0:
            print(total / (i + 1))
    accuracy = evaluate()
    history.append(accuracy)
    if accuracy > best:
        best, bad = accuracy, 0
    else:
        bad += 1
        if bad > 3:
            break
# bad best count total

# the end is decided by the loss, and the first loss is kept
done = begin = None
losses = iter([4.0, 2.0, 0.1])
while not done:
    loss = next(losses)
    if begin is None:
        begin = loss
    done = loss < 0.1 * begin
    boundary()
# begin done

# the test of the loop binds, and takes several lines
previous, source = 0.0, iter(loader())
while (
    (batch := next(source, None)) is not None
    and batch > -1
):
    loss = model(batch)
    if (gap := loss - previous) > 100:
        print(gap)
    previous = loss
    boundary()
print(loss)
# previous

# a test that is read before and after the body, and continue
count, limit, last = 0, 3, 0
while count < limit:
    count += 1
    if count == 2:
        print(last)
        continue
    last = model(count)
    boundary()
# count last

# exceptions that are caught
skipped, scale = 0, 1.0
for batch in loader():
    try:
        loss = 1 / (batch - 2)
    except ZeroDivisionError as error:
        skipped += 1
        message = str(error)
        continue
    finally:
        scale = scale * 2
    boundary()
print(skipped)
# scale skipped

# a loss that an exception leaves as it was
for batch in loader():
    try:
        loss = 1 / (batch - 2)
    except ZeroDivisionError:
        pass
    model(loss)
    boundary()
# loss

# blocks
earlier = None
for batch in loader():
    with block() as inner, block():
        loss = model(batch)
        if earlier is not None:
            loss = loss + earlier
        boundary()
    earlier = loss
# earlier

# comprehensions have variables of their own
i, rest = 0, [1, 2]
for batch in loader():
    values = [i * v for i in range(3) for v in (1, 2)]
    table = {k: v for k, v in zip(values, values)}
    rest = [w for w in rest if w]
    print([[v * i for v in rest] for i in range(2)], table)
    i += 1
    boundary()
# i rest

# cases
mode, number = "warm", 0
for batch in loader():
    match mode:
        case "warm":
            loss, number = model(batch), number + 1
            if number > 2:
                mode = "train"
        case str(other):
            loss = model(batch) * 2
    boundary()
# mode number

# the best weights are only read when all is over
best, kept = 1e9, None
for epoch in range(2):
    for batch in loader():
        model(batch)
        boundary()
    value = evaluate() - epoch
    if value < best:
        best = value
        kept = value
print(kept)
# best kept

# the loop calls a function that a test of it runs
count = 0
while boundary() and count < 3:
    count += 1
# count
"""

FUNCTIONS = """
# shared with a function inside
def run():
    count, seen = 0, 0
    def note(value):
        nonlocal seen
        seen += value
        return count
    for batch in loader():
        loss = model(batch) + count
        count += 1
        note(loss)
        boundary()
# count

# a global name
total = 0
def run():
    global total
    for batch in loader():
        model(batch)
        total += 1
        boundary()
# total

# more than 256 instructions are jumped over
def run():
    count = last = 0
    while count < 3:
        if count == 1:
            LONG
        last = last + count
        boundary()
        count += 1
    return last
# count last

# so long that a loop begins with an extended jump
def run():
    for epoch in range(2):
        for batch in loader():
            LONG
            loss = model(batch)
            boundary()
        print(loss)
#
""".replace("LONG", "print(" + ", ".join(["boundary"] * 1500) + ")")


def _table(text: str) -> Iterator[Any]:
    for each in text.strip().split("\n\n"):
        title, body, names = re.fullmatch(r"# (.*?)\n(.*\n)# ?(.*)", each, re.DOTALL).groups()  # type: ignore[union-attr]
        yield pytest.param(body, set(names.split()), id=title.partition(",")[0])


@contextmanager
def _block() -> Iterator[None]:
    yield


def _seen(text: str) -> tuple[set[str], list[set[str]]]:
    """What the program `text` carries, and what `rebound_in` says at each of its boundaries."""
    names: set[str] = set()
    rebound: list[set[str]] = []

    def boundary() -> bool:
        frame = sys._getframe(1)
        names.update(carried(frame))
        rebound.append(rebound_in(frame))
        return True

    world = {
        "SimpleNamespace": SimpleNamespace,
        "block": _block,
        "boundary": boundary,
        "evaluate": lambda: 0.7,
        "fetch": lambda: 1.0,
        "loader": lambda: [1.0, 2.0, 3.0],
        "model": lambda value, *_: value * 0.5,
        "play": lambda _: (1.0, 2.0, False),
        "print": lambda *_: None,
    }
    exec(compile(text, "train.py", "exec"), world)  # noqa: S102
    assert rebound
    return names, rebound


@pytest.mark.parametrize(("body", "names"), list(_table(LOOPS)))
def test_loop(body: str, names: set[str]) -> None:
    assert _seen(body)[0] == names, "at the top of a module"
    assert _seen("def run():\n" + textwrap.indent(body, "    ") + "run()\n")[0] == names, "in a function"


@pytest.mark.parametrize(("body", "names"), list(_table(FUNCTIONS)))
def test_function(body: str, names: set[str]) -> None:
    assert _seen(body + "run()\n")[0] == names


def test_rebound_is_what_each_iteration_binds_before_it_reads_it() -> None:
    text = """
    total = 0.0
    for i, batch in enumerate(loader()):
        loss = model(batch)
        total += loss
        if i == 1:
            shown = loss
        boundary()
    """
    assert _seen(textwrap.dedent(text))[1][0] == {"batch", "loss", "shown"}


def test_odd_code_has_no_names() -> None:
    def make(code: CodeType) -> Any:
        return SimpleNamespace(f_code=code, f_lasti=4, f_locals={})

    code = _seen.__code__
    for odd in (
        code.replace(co_code=code.co_code[:6]),
        code.replace(co_code=bytes(len(code.co_code))),
        code.replace(co_names=(), co_consts=()),
        code.replace(co_code=code.co_code * 1000),
        None,
    ):
        assert carried(make(odd)) == set() and rebound_in(make(odd)) == set()  # type: ignore[arg-type]
