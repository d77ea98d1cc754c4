"""torch.compile and sizes that vary: a resumed run may use other code than the uninterrupted one, and that is said.

A backend that makes code for sizes as variables give other numbers than code for exact sizes, and other ones for
another example, stands in for inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mindx_elastic import Guard
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import GracefulExit
from tests.guarded import stop_and_wait

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # `torch.compile` takes the scheduler's count of steps away
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]

EPOCHS, STEPS_AN_EPOCH = 3, 3  # the last batch of an epoch has 3 samples, the others 8
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Make = Callable[[nn.Module], Loss]
"""Compiles the network, or a function around it."""


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


def of_module(network: nn.Module, **options: Any) -> Loss:
    compiled: Any = torch.compile(network, backend=sensitive, **options)
    return lambda x, y: nn.functional.cross_entropy(compiled(x), y)


def of_function(network: nn.Module, **options: Any) -> Loss:
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(network(x), y)

    compiled: Loss = torch.compile(loss_of, backend=sensitive, **options)
    return compiled


def not_dynamic(network: nn.Module) -> Loss:
    return of_function(network, dynamic=False)


@dataclass
class Trained:
    weights: list[torch.Tensor]
    notes: Sequence[str]


def train(
    make: Make,
    directory: Path,
    *,
    drop_last: bool = False,
    stop: int = 0,
    rate: float | torch.Tensor = 0.01,
    compile_step: bool = False,
) -> Trained:
    """As if the process were new: dynamo has forgotten all. compile_step: of the optimizer, whose rate varies."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))
    loss_of = make(network)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(19, 4, generator=generator), torch.randint(0, 3, (19,), generator=generator))
    loader = ResumableLoader(data, batch_size=8, shuffle=True, seed=3, drop_last=drop_last)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    step: Any = torch.compile(optimizer.step, backend=sensitive) if compile_step else optimizer.step
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if compile_step else 1.0)
    states: dict[str, Any] = {"model": network, "optimizer": optimizer, "lr_scheduler": scheduler, "loader": loader}
    guard = Guard(**states, directory=directory, prefix="job")
    try:
        with guard:
            for _ in guard.epochs(EPOCHS):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss_of(x, y).backward()
                    step()
                    scheduler.step()
                    if guard.step + 1 == stop:
                        stop_and_wait(SimpleNamespace(guard=guard))  # type: ignore[arg-type]
                    guard.step_end()
    except GracefulExit:
        assert stop
    return Trained([value.clone() for value in network.state_dict().values()], guard._unmanaged.notes)


def differs(make: Make, directory: Path, stop: int, **options: Any) -> tuple[bool, Trained, Trained]:
    """Whether a run that was stopped ends with other weights; the interrupted and the resumed run."""
    whole = train(make, directory / "whole", **options)
    first = train(make, directory / "stopped", stop=stop, **options)
    second = train(make, directory / "stopped", **options)
    return not all(map(torch.equal, whole.weights, second.weights)), first, second


@pytest.mark.parametrize("make", [of_module, of_function])
def test_sizes_that_vary_are_told(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    is_other, first, second = differs(make, tmp_path, STEPS_AN_EPOCH + 1)
    assert is_other
    for trained in (first, second):  # the first has met both sizes before it was stopped
        (note,) = trained.notes
        assert note.startswith("torch.compile") and "numbers that vary" in note
    assert "drop_last=True" in caplog.text and "dynamic=False" in caplog.text


def test_a_size_that_a_resumed_run_alone_sees_vary_is_told_there(tmp_path: Path) -> None:
    is_other, first, second = differs(of_function, tmp_path, STEPS_AN_EPOCH - 1)
    assert is_other and not first.notes
    (note,) = second.notes
    assert "loss_of" in note and "test_compilation.py" in note


@pytest.mark.parametrize(("make", "drop_last"), [(not_dynamic, False), (of_module, True)])
def test_what_the_line_says_is_exact(make: Make, drop_last: bool, tmp_path: Path) -> None:
    is_other, first, second = differs(make, tmp_path, STEPS_AN_EPOCH - 1, drop_last=drop_last)
    assert not is_other and not first.notes and not second.notes


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_compiled_step_of_the_optimizer_is_told_if_its_rate_is_a_number(is_tensor: bool, tmp_path: Path) -> None:
    from torch._dynamo.pgo import get_code_state

    rate = torch.tensor(0.01) if is_tensor else 0.01
    trained = train(not_dynamic, tmp_path, rate=rate, compile_step=True, drop_last=True)
    assert [note.partition(" (")[0] for note in trained.notes] == [] if is_tensor else ["torch.compile compiles step"]
    compiled = {code.filename for code in get_code_state()}
    assert compiled and not any("/mindx_elastic/" in each for each in compiled), "only what is the program's"
