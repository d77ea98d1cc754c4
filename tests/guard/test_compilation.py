"""torch.compile and sizes that vary: a resumed run may use other code than the uninterrupted one, and that is said.

A backend that makes code for sizes as variables give other numbers than code for exact sizes, and other ones for
another example, stands in for inductor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mindx_elastic import Guard
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import GracefulExit
from tests.guarded import no_traces, plain_environment
from tests.harness import wait_until

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo

EPOCHS, STEPS_AN_EPOCH = 3, 3  # the last batch of an epoch has 3 samples, the others 8
Call = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield
    torch._dynamo.reset()


def sensitive(graph: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """A backend whose code depends on whether a size is a variable, and on the example that it was compiled for."""
    factor = 1 + sum(each.node.hint for each in inputs if isinstance(each, torch.SymInt)) / 1000

    def run(*args: Any) -> Any:
        return tuple(out * factor if isinstance(out, torch.Tensor) else out for out in graph.forward(*args))

    return run


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


@dataclass
class Job:
    """A training in this process, as if the process were new: dynamo has forgotten everything."""

    network: nn.Module
    call: Call
    given: nn.Module
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy
    drop_last: bool = False
    warnings: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def run(self, directory: Path, stop_after: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(19, 4, generator=generator), torch.randint(0, 3, (19,), generator=generator))
        loader = ResumableLoader(data, batch_size=8, shuffle=True, seed=3, drop_last=self.drop_last)
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.01)
        guard = Guard(model=self.given, optimizer=optimizer, loader=loader, directory=directory, prefix="job")
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mindx_elastic").addHandler(handler)
        try:
            with guard:
                for _ in guard.epochs(EPOCHS):
                    for x, y in loader:
                        optimizer.zero_grad()
                        self.loss(self.call(x), y).backward()
                        optimizer.step()
                        if guard.position.step + 1 == stop_after:
                            guard.request_stop("the test")
                            wait_until(lambda: guard.stopper.agreed_step is not None, "the agreement")
                        guard.step_end()
        except GracefulExit:
            assert stop_after
        finally:
            logging.getLogger("mindx_elastic").removeHandler(handler)
        self.notes = guard._unmanaged.notes
        return {name: value.clone() for name, value in self.network.state_dict().items()}

    @property
    def words_on_compilation(self) -> list[str]:
        return [line for line in self.warnings if line.startswith("torch.compile")]


def of_module(**options: Any) -> Job:
    network = make_network()
    compiled: Any = torch.compile(network, **{"backend": sensitive, **options})
    return Job(network, compiled, compiled)


def of_function(**options: Any) -> Job:
    network = make_network()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(network(x), y)

    return Job(network, lambda x: x, network, loss=torch.compile(loss_of, **{"backend": sensitive, **options}))


def anew(make: Callable[[], Job]) -> Job:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return make()


def differences(
    make: Callable[[], Job], directory: Path, stop_after: int, weights: dict[str, torch.Tensor] | None = None
) -> tuple[list[str], Job, Job]:
    """What differs between an uninterrupted run and one that was stopped; the interrupted and the resumed job."""
    weights = weights or anew(make).run(directory / "uninterrupted")
    first = anew(make)
    first.run(directory / f"stopped_{stop_after}", stop_after)
    second = anew(make)
    resumed = second.run(directory / f"stopped_{stop_after}")
    return [name for name, value in weights.items() if not torch.equal(value, resumed[name])], first, second


@pytest.mark.parametrize("make", [of_module, of_function])
def test_sizes_that_vary_are_told(make: Callable[[], Job], tmp_path: Path) -> None:
    different, first, second = differences(make, tmp_path, STEPS_AN_EPOCH + 1)
    assert different
    for job in (first, second):  # the first has met both sizes before it was stopped
        (line,) = job.words_on_compilation
        assert "sizes that vary" in line and "drop_last=True" in line and "dynamic=False" in line
        assert len(job.notes) == 1


def test_a_size_that_a_resumed_run_alone_sees_vary_is_told_there(tmp_path: Path) -> None:
    different, first, second = differences(of_function, tmp_path, STEPS_AN_EPOCH - 1)
    assert different and first.words_on_compilation == []
    (line,) = second.words_on_compilation
    assert "loss_of" in line and "test_compilation.py" in line


def of_one_size() -> Job:
    job = of_module()
    job.drop_last = True
    return job


@pytest.mark.parametrize("make", [lambda: of_function(dynamic=False), of_one_size])
def test_what_the_line_says_is_exact(make: Callable[[], Job], tmp_path: Path) -> None:
    different, first, second = differences(make, tmp_path, STEPS_AN_EPOCH - 1)
    assert different == [] and first.notes == second.notes == () and second.words_on_compilation == []
