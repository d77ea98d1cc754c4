"""The program's own variables, as a proof notes them."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from torch import nn

from mindx_elastic.guard.checks import program_variables
from mindx_elastic.prove.variables import KEPT, Variables

TOKEN = "sk-0123456789"


class Trainer:
    patience = 2

    def __init__(self) -> None:
        self.best, self.history = 0.5, [1.0, 2.0]
        self.fetched = 0

    @property
    def never(self) -> int:
        raise AssertionError("no code of the program is run")


def noted(*kept: Any, **variables: Any) -> dict[str, str]:
    """By the name alone, of the variables of this function (which are given) and of this file."""

    def program() -> dict[str, str]:
        values = variables  # noqa: F841 - it is looked at
        return Variables({id(each) for each in kept}).of_program(sys._getframe())

    names = {name.partition(" (")[0].replace('"', ""): value for name, value in program().items()}
    return {re.sub(r"values\['(\w+)'\]", r"\1", name): value for name, value in names.items()}


def test_numbers_are_shown_by_their_names_and_what_the_guard_keeps_is_left_out() -> None:
    """A clock is one in each process."""
    trainer, kept, centre, now = Trainer(), Trainer(), torch.zeros(3), time.time() - 100
    given = {"count": 3, "best": 0.5, "done": False, "began": now, "step_began": time.perf_counter()}
    found = noted(kept, centre, trainer=trainer, kept=kept, centre=centre, **given)
    clocks = dict.fromkeys(("began", "step_began"), "a clock")
    assert {name: found[name] for name in given} == {"count": "3", "best": "0.5", "done": "False", **clocks}
    attributes = {"best": "0.5", "history": "2", "patience": "2", "fetched": "0", "history[0]": "1.0"}
    of_trainer = {name: value for name, value in found.items() if "trainer." in name}
    assert of_trainer == {
        **{f"trainer.{name}": value for name, value in attributes.items() if name != "history"},
        "trainer.history[1]": "2.0",
        "the length of trainer.history": "2",
    }
    assert "kept.best" not in found and "centre" not in found


def test_texts_are_noted_by_a_hash_only() -> None:
    one, other = noted(token=TOKEN, mode="train"), noted(token=TOKEN, mode="eval")
    assert not any(text in f"{one}{other}" for text in (TOKEN, "'train'", "'eval'"))
    assert one["token"] == other["token"] and one["mode"] != other["mode"]
    assert "x" * 97 not in str(noted(table={"x" * 97: 1})), "nor a long key"


def test_tensors_and_arrays() -> None:
    given = {
        "centre": torch.zeros(3),
        "table": np.zeros(4),
        "loss": torch.tensor(0.5),
        "best": np.float64(0.25),
        "objects": np.array([Trainer()]),
        "sparse": torch.eye(3).to_sparse(),
        "model": nn.Linear(2, 2),
    }
    found = noted(**given)
    assert given.keys() & found.keys() == {"centre", "table", "loss", "best"}
    assert (found["loss"], found["best"]) == ("0.5", "0.25") and found["centre"] != noted(centre=torch.ones(3))[
        "centre"
    ]


def compared(**values: Any) -> dict[str, str]:
    """By the name alone, as survivors of a recovery and new processes note them."""

    def program() -> dict[str, str]:
        kept = values  # noqa: F841 - it is looked at
        return Variables((), positions=True).of_program(sys._getframe())

    return {name.partition(" (")[0]: value for name, value in program().items() if "kept[" in name}


def test_of_large_tensors_and_arrays_samples_are_noted() -> None:
    tensor, array = torch.zeros(1 << 22), np.ones((1 << 10, 1 << 10))
    before = compared(tensor=tensor, array=array, some=tensor[::2])
    assert set(before) == {"\"kept['tensor']\"", "\"kept['array']\""}
    assert compared(tensor=tensor.clone(), array=array.copy()).items() >= before.items()
    tensor += 1
    array[512:] = 2
    after = compared(tensor=tensor, array=array)
    assert all(after[name] != before[name] for name in before)


def test_of_files_that_are_read_the_position_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("one\ntwo\n")
    with path.open() as text, path.open() as lines, path.open("rb") as data, path.open("a") as log:
        text.read(3)
        next(lines)
        data.read(2)
        log.write("three")
        found = noted(text=text, lines=lines, data=data, log=log)
    stands = [found[f"the position of {name}"] for name in ("text", "lines", "data")]
    assert stands == ["3", "8", "2"] and "the position of log" not in found


def test_of_long_containers_the_length_is_noted() -> None:
    found = noted(losses=deque(range(500)), rows=list(range(65)))
    assert found["the length of losses"] == "500" and found["the length of rows"] == "65"
    ends = {name for name in found if name.startswith(("rows[", "losses["))}
    assert ends == {f"{name}[{end}]" for name in ("losses", "rows") for end in (0, -1)}
    weights = noted(best={"blocks.0.attention.in_projection.weight": torch.zeros(2)})
    assert "best['blocks.0.attention.in_projection.weight']" in weights


def test_of_objects_of_a_library_only_counts_and_tensors_are_noted() -> None:
    writer = jinja2.Environment()
    vars(writer).update(number=1, began=1.5, file="events.out", average=[torch.zeros(2)], rows=[1])
    found = {name.partition("writer.")[2] for name in noted()}
    assert {"number", "average", "average[0]"} <= found and not {"began", "file", "rows"} & found


def test_it_is_bounded() -> None:
    nested: list[Any] = [[[index] * 60 for index in range(60)] for _ in range(60)]
    assert len(noted(nested=nested)) <= 2000


def test_what_changes_in_containers_of_the_standard_library_and_in_defaults_is_found() -> None:
    """A full window has always the same length, a counter the same keys."""

    def scaled(x: float, calls: list[int] = [], *, seen: dict[str, int] = {}) -> float:  # noqa: B006
        calls.append(1)
        seen["last"] = len(calls)
        return x * len(calls)

    window, votes, sums, best = deque([1.0] * 3, maxlen=3), Counter({4: 1}), defaultdict(float), OrderedDict(loss=2.0)
    sums["loss"] = 0.0

    def looked_at() -> dict[str, str]:
        scaled(1.0)
        return Variables((), positions=True).of_program(sys._getframe(1))

    before = looked_at()
    window.append(5.0)
    votes[4] += 1
    sums["loss"] += 1.0
    best["loss"] = 1.0
    after = looked_at()
    changed = {name.split('"')[1] for name in after if after[name] != before.get(name)}
    expected = {"window[-1]", "votes[4]", "sums['loss']", "best['loss']", "scaled.calls", "scaled.seen['last']"}
    assert expected <= changed


class Warming(torch.optim.SGD):
    """Counts its steps in an attribute."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        self._warmed, self.sums = 0, {"loss": 0.5}


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.zeros(2)), nn.Dropout(0.1)
        self.queue, self._at, self.history = torch.zeros(2), 0, [1.0]
        self.mean = nn.Buffer(torch.zeros(2))


def test_of_kept_objects_what_no_state_need_have_is_noted() -> None:
    model, trainer = Memory(), Trainer()
    hess = model.weight.hess = torch.ones(2)  # type: ignore[attr-defined]
    optimizer = Warming(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    targets = {"model": model, "optimizer": optimizer, "trainer": trainer, "losses": [1.0]}

    def looked_at() -> dict[str, str]:
        return Variables(()).of_kept(targets)

    before = looked_at()
    model._at, model.drop.p, trainer.best = 1, 0.5, 0.25
    model.history.append(2.0)
    optimizer._warmed += 1
    optimizer.sums["loss"] = 0.0
    with torch.no_grad():
        torch._foreach_add_([model.queue, hess, model.weight, model.mean], 1)
    after = looked_at()
    assert all(name.endswith(f"({KEPT})") for name in before)
    changed = {name.partition(" (kept")[0]: value for name, value in after.items() if value != before.get(name)}
    expected = {'"model._at"': "1", '"model.drop.p"': "0.5", '"trainer.best"': "0.25", '"optimizer._warmed"': "1"}
    assert {name: changed.get(name) for name in expected} == expected
    others = {'"model.queue"', '"model.weight.hess"', "\"optimizer.sums['loss']\""}
    others |= {'the length of "model.history"', '"model.history[1]"'}
    assert changed.keys() == expected.keys() | others
    assert not [name for name in before if "losses" in name or "_opt" in name]


def test_a_weight_that_a_hook_of_torch_makes_before_each_forward_is_not_noted() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[1].weight_of_mine = torch.ones(2)
    (name,) = Variables(()).of_kept({"model": model})
    assert "weight_of_mine" in name


def test_a_scheduler_inside_of_a_kept_object_of_a_library() -> None:
    """A library's scheduler may leave out of its state what the one of torch's in it counts."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], 0.1))
    around = jinja2.Environment()
    vars(around).update(plateau=plateau)
    for _ in range(3):
        plateau.step(1.0)
    assert Variables(()).of_kept({"sched": around})[f'"sched.plateau.num_bad_epochs" ({KEPT})'] == "2"


def test_a_metaclass_whose_classes_have_a_name_of_a_module() -> None:
    class Meta(type):
        __module__ = property(lambda cls: "somewhere")  # as Cython's

    assert program_variables.kind_of(Meta) == ""
