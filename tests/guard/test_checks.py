"""What the guard says of state that it does not keep, over small trainings (see `tests.guard.programs`)."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.capture.device_progress import DeviceProgress
from mindx_elastic.errors import UnmanagedStateError
from mindx_elastic.guard.checks import program_variables
from mindx_elastic.guard.checks.movements import TensorsLook
from mindx_elastic.guard.checks.remedies import Remedies
from mindx_elastic.persist.format import read_header
from tests.guard.programs import EXACT, LATE_AVERAGE, NOTED, REFUSED, run

pytestmark = pytest.mark.usefixtures("clean")


@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_said_of_an_exact_program(name: str, tmp_path: Path) -> None:
    assert run(name, EXACT[name], tmp_path) == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_certain_is_refused_with_its_name_and_the_line_to_write(name: str, tmp_path: Path) -> None:
    source, words = REFUSED[name]
    with pytest.raises(UnmanagedStateError) as caught:
        run(name, source, tmp_path)
    assert words in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("name", [*REFUSED][::6])  # the way is the same for all
def test_a_warning_where_the_user_wants_that(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, words = REFUSED[name]
    notes = run(name, source, tmp_path, unmanaged="warn")
    said = words.partition(". ")[0]
    assert [note for note in notes if said in note], notes
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and said in r.getMessage()]
    assert len(warned) == 1
    (file,) = tmp_path.rglob("*.safetensors")
    assert read_header(file).info.unmanaged == notes


@pytest.mark.parametrize("name", NOTED)
def test_a_risk_is_one_warning_and_a_note_in_the_file(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, words = NOTED[name]
    assert run(name, source, tmp_path) == (words,)
    assert len([record for record in caplog.records if words in record.getMessage()]) == 1
    (file,) = tmp_path.rglob("*.safetensors")
    assert read_header(file).info.unmanaged == (words,)


@pytest.mark.parametrize("by_data", [False, True], ids=["counted", "by .data"])
def test_a_named_average_that_is_updated_after_the_boundary_is_refused(by_data: bool, tmp_path: Path) -> None:
    source = LATE_AVERAGE.replace("e.lerp_(p, 0.1)", "e.data.lerp_(p.data, 0.1)") if by_data else LATE_AVERAGE
    with pytest.raises(UnmanagedStateError, match=r"^model_1 moves after guard.step_end\(\) and before"):
        run("late", source, tmp_path)


def test_a_look_waits_for_the_devices_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a collective that never ends its reads would fill the queue, and nothing could be saved."""
    order: list[str] = []
    look_at = TensorsLook.at
    monkeypatch.setattr(DeviceProgress, "wait_for_update", lambda self: order.append("wait"))
    monkeypatch.setattr(DeviceProgress, "is_used", property(lambda self: True, lambda self, used: None), raising=False)
    monkeypatch.setattr(TensorsLook, "at", lambda tensors: order.append("look") or look_at(tensors))  # type: ignore[func-returns-value]
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path, unmanaged="warn", signals=()) as guard:
        order.clear()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step_end()
        assert "look" in order and order[0] == "wait"
    assert average is not None


def test_modules_of_the_program_are_those_that_have_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, facts in {"mine": {"__file__": "/somewhere/mine.py"}, "made": {}}.items():
        module = types.ModuleType(name)
        vars(module).update(facts)
        monkeypatch.setitem(sys.modules, name, module)
    places = dict(program_variables.variables_of(None))
    assert "mine.py" in places and "made" not in places


def test_the_line_to_write_is_python_for_a_part_of_a_sequential_and_of_a_closure() -> None:
    assert Remedies({}).stateful_line(["model.0.gen"]) == 'Write Guard(stateful={"gen": model[0].gen}, ...)'
    line = Remedies({}).stateful_line(["noise.<gen>"])
    assert line == 'Write Guard(stateful={"gen": gen}, ...), made where the guard is, and give it to what makes noise'
    in_model = Remedies({"model"}, is_layered=True)
    assert in_model.argument_line("model", ["extra"]) == 'Write stateful={"extra": extra}'


def test_an_optimizer_of_new_parameters_is_refused_where_frozen_ones_keep_their_gradients(tmp_path: Path) -> None:
    """As adapters that are trained in place of the model: each step looks like a part of one accumulation."""
    model, adapter, x = nn.Linear(2, 1), nn.Linear(2, 1), torch.ones(3, 2)

    def train() -> None:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path) as guard:
            for step in guard.steps(8):
                if step == 3:
                    model.requires_grad_(False)
                    optimizer = torch.optim.Adam(adapter.parameters())
                optimizer.zero_grad()
                (model(x) + adapter(x)).sum().backward()
                optimizer.step()
                guard.step_end()

    with pytest.raises(UnmanagedStateError, match="steps and is not named"):
        train()
