"""torch.compile and sizes that vary: a resumed run may use other code than the uninterrupted one, and that is said.

A backend that makes code for sizes as variables give other numbers than code for exact sizes, and other ones for
another example, stands in for inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mindx_elastic.data import ResumableLoader
from tests.guard.program import Loop, Program, run, stopped

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

STEPS_AN_EPOCH = 3  # the last batch of an epoch has 3 samples, the others 8


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def sensitive(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend whose code depends on whether a size is a variable, and on the example that it was compiled for."""
    factor = 1 + sum(each.node.hint for each in inputs if isinstance(each, torch.SymInt)) / 1000

    def run(*args: Any) -> Any:
        return tuple(out * factor if isinstance(out, torch.Tensor) else out for out in graph.forward(*args))

    return run


def compiled(*, of_module: bool = False, dynamic: bool | None = None, step: bool = False) -> Loop:
    """Compiles the network (`of_module`) or a function around it, or the optimizer's `step`, whose rate varies."""

    def loop(p: Program) -> None:
        network: Any = torch.compile(p.network, backend=sensitive, dynamic=dynamic) if of_module else p.network

        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(network(x), y)

        loss: Any = loss_of if of_module else torch.compile(loss_of, backend=sensitive, dynamic=dynamic)
        if step:
            p.opt.step = torch.compile(p.opt.step, backend=sensitive)  # type: ignore[method-assign]
        for _ in p.guard.epochs(3):
            for x, y in p.loader:
                loss(x, y).backward()
                if step:
                    p.opt.step()
                    p.opt.param_groups[0]["lr"] *= 0.9
                    p.opt.zero_grad()
                else:
                    p.update()
                p.guard.step_end()

    return loop


def loader(*, drop_last: bool = False) -> Any:
    """Of a new process: dynamo has forgotten all."""
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(19, 4, generator=draw), torch.randint(0, 3, (19,), generator=draw))
    return ResumableLoader(data, batch_size=8, shuffle=True, seed=3, drop_last=drop_last)


def differs(loop: Loop, directory: Path, stop: int, **options: Any) -> tuple[bool, list[tuple[str, ...]]]:
    """Whether a run that was stopped ends with other weights; the notes of the interrupted and of the resumed run."""
    _, whole = run(loop, directory / "whole", loader=loader(**options))
    first = stopped(loop, directory / "stopped", stop, loader=loader(**options))
    second, result = run(loop, directory / "stopped", loader=loader(**options))
    same = all(torch.equal(value, result["weights"][name]) for name, value in whole["weights"].items())
    return not same, [each.guard._unmanaged.notes for each in (first, second)]


@pytest.mark.parametrize("of_module", [True, False])
def test_sizes_that_vary_are_told(of_module: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    is_other, notes = differs(compiled(of_module=of_module), tmp_path, STEPS_AN_EPOCH + 1)
    assert is_other
    for (note,) in notes:  # the first has met both sizes before it was stopped
        assert note.startswith("torch.compile") and "numbers that vary" in note
    assert "drop_last=True" in caplog.text and "dynamic=False" in caplog.text


def test_a_size_that_a_resumed_run_alone_sees_vary_is_told_there(tmp_path: Path) -> None:
    is_other, (first, (note,)) = differs(compiled(), tmp_path, STEPS_AN_EPOCH - 1)
    assert is_other and not first and "loss_of" in note and "test_compilation.py" in note


@pytest.mark.parametrize(("loop", "drop_last"), [(compiled(dynamic=False), False), (compiled(of_module=True), True)])
def test_what_the_line_says_is_exact(loop: Loop, drop_last: bool, tmp_path: Path) -> None:
    assert differs(loop, tmp_path, STEPS_AN_EPOCH - 1, drop_last=drop_last) == (False, [(), ()])


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_compiled_step_of_the_optimizer_is_told_if_its_rate_is_a_number(is_tensor: bool, tmp_path: Path) -> None:
    from torch._dynamo.pgo import get_code_state

    p = Program(tmp_path, loader=loader(drop_last=True))
    if is_tensor:
        p.opt.param_groups[0]["lr"] = torch.tensor(0.01)
    with p.guard:
        compiled(dynamic=False, step=True)(p)
    notes = p.guard._unmanaged.notes
    assert [note.partition(" (")[0] for note in notes] == [] if is_tensor else ["torch.compile compiles step"]
    files = {code.filename for code in get_code_state()}
    assert files and not any("/mindx_elastic/" in each for each in files), "only what is the program's"
