"""torch.compile and sizes that vary: the resumed run uses the same compiled code as the uninterrupted one, or says so.

A backend that makes code for sizes as variables give other numbers than code for exact sizes, and other ones for
another example, stands in for inductor; one test uses inductor itself.
"""

from __future__ import annotations

import logging
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mindx_elastic import Guard
from mindx_elastic.capture.compiled_calls import calls_in
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard import start as start_module
from mindx_elastic.guard.compilation import CompiledPart, tell_of_torchscript
from mindx_elastic.guard.unmanaged import Unmanaged
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(self.dropout(self.norm(x)))
        return out


class Decorated(Network):
    @torch.compile(backend=sensitive)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@dataclass
class Job:
    """A training in this process, as if the process were new: dynamo has forgotten everything."""

    network: nn.Module
    call: Call
    given: nn.Module
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy
    drop_last: bool = False
    evaluate: Callable[[Guard], object] = lambda guard: None
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
                        self.evaluate(guard)
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
        return [line for line in self.warnings if line.startswith(("torch.compile", "what torch.compile"))]


def of_module(**options: Any) -> Job:
    network = Network()
    compiled: Any = torch.compile(network, **{"backend": sensitive, **options})
    return Job(network, compiled, compiled)


def of_raw_module() -> Job:
    network = Network()
    return Job(network, torch.compile(network, backend=sensitive), network)


def in_place() -> Job:
    network = Network()
    network.compile(backend=sensitive)
    return Job(network, network, network)


def of_parts() -> Job:
    network = Network()
    for block in network.blocks:
        block.compile(backend=sensitive)
    return Job(network, network, network)


def of_method() -> Job:
    network = Network()
    network.forward = torch.compile(network.forward, backend=sensitive)  # type: ignore[method-assign]
    return Job(network, network, network)


def of_bound_method() -> Job:
    network = Network()
    return Job(network, torch.compile(network.forward, backend=sensitive), network)


def of_class_method() -> Job:
    network = Decorated()
    return Job(network, network, network)


def with_named_arguments() -> Job:
    class Named(Network):
        def forward(self, batch: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(batch["x"])

    network = Named()
    compiled: Any = torch.compile(network, backend=sensitive)
    return Job(network, lambda x: compiled(batch={"x": x, "kind": ["a", 1, None]}), compiled)


def of_marked() -> Job:
    job = of_module()
    compiled = job.call

    def call(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        return compiled(x)

    job.call = call
    return job


def with_evaluations() -> Job:
    job = of_module()

    def evaluate(guard: Guard) -> None:
        if guard.position.step % 2 == 1:
            with guard.outside_step(), torch.no_grad():
                job.network.eval()
                job.call(torch.ones(11, 4))
                job.network.train()

    job.evaluate = evaluate
    return job


def of_function(**options: Any) -> Job:
    network = Network()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(network(x), y)

    return Job(network, lambda x: x, network, loss=torch.compile(loss_of, **{"backend": sensitive, **options}))


MODULES: dict[str, Callable[[], Job]] = {
    "module": of_module,
    "raw module": of_raw_module,
    "in place": in_place,
    "parts": of_parts,
    "method": of_method,
    "bound method": of_bound_method,
    "class method": of_class_method,
    "named arguments": with_named_arguments,
    "marked": of_marked,
    "evaluations": with_evaluations,
    "dynamic": lambda: of_module(dynamic=True),
    "static": lambda: of_module(dynamic=False),
}


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


@pytest.mark.few(2)
@pytest.mark.parametrize("form", MODULES)
def test_a_module_is_compiled_the_same_again(form: str, tmp_path: Path) -> None:
    weights = anew(MODULES[form]).run(tmp_path / "uninterrupted")
    for stop_after in (STEPS_AN_EPOCH - 1, STEPS_AN_EPOCH + 1):  # before a short batch, a full one
        different, first, second = differences(MODULES[form], tmp_path, stop_after, weights)
        assert different == []
        assert first.words_on_compilation == second.words_on_compilation == []


def test_without_it_the_weights_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "restore_compiled", lambda *args: None)
    different, _, _ = differences(of_module, tmp_path, STEPS_AN_EPOCH - 1)
    assert different


def has_compiler() -> bool:
    return (
        any(map(shutil.which, ("c++", "g++", "clang++"))) and Path(sysconfig.get_path("include"), "Python.h").exists()
    )


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler and Python's headers")
def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def small() -> Job:
        network = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Softmax(0), nn.Linear(6, 3))
        compiled: Any = torch.compile(network)
        return Job(network, compiled, compiled)

    different, _, second = differences(small, tmp_path, STEPS_AN_EPOCH - 1)
    assert different == [] and second.words_on_compilation == []


def test_a_function_with_sizes_that_vary_is_named(tmp_path: Path) -> None:
    different, first, second = differences(of_function, tmp_path, STEPS_AN_EPOCH + 1)
    assert different
    for job in (first, second):
        (line,) = job.words_on_compilation
        assert "loss_of" in line and "test_compilation.py" in line and "sizes that vary" in line
        assert "drop_last=True" in line and len(job.notes) == 1


def test_a_function_whose_first_size_is_another_after_the_resume_is_named(tmp_path: Path) -> None:
    different, first, second = differences(of_function, tmp_path, STEPS_AN_EPOCH - 1)
    assert different and first.words_on_compilation == []
    assert len(second.words_on_compilation) == 1


@pytest.mark.parametrize(
    "make", [lambda: of_function(dynamic=False), lambda: of_function(backend="eager", dynamic=False)]
)
def test_a_function_with_code_for_each_size_is_exact(make: Callable[[], Job], tmp_path: Path) -> None:
    different, first, second = differences(make, tmp_path, STEPS_AN_EPOCH - 1)
    assert different == [] and first.notes == second.notes == ()


@pytest.mark.parametrize("make", [of_function, of_module])
def test_one_size_is_exact(make: Callable[[], Job], tmp_path: Path) -> None:
    def of_one_size() -> Job:
        job = make()
        job.drop_last = True
        return job

    different, first, second = differences(of_one_size, tmp_path, 3)
    assert different == [] and first.warnings[2:] == second.warnings == [] and second.notes == ()


def test_a_forward_that_cannot_be_repeated_is_named(tmp_path: Path) -> None:
    class Picky(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not bool((x < 0).any()):  # real batches have negative numbers
                raise ValueError("only real samples")
            return super().forward(x)

    def make() -> Job:
        network = Picky()
        compiled: Any = torch.compile(network, backend=sensitive)
        return Job(network, compiled, compiled)

    _, first, second = differences(make, tmp_path, STEPS_AN_EPOCH + 1)
    assert first.words_on_compilation == []
    (line,) = second.words_on_compilation
    assert "ValueError: only real samples" in line and "could not be compiled the same again" in line


def test_the_replay_leaves_no_trace(tmp_path: Path) -> None:
    class Counting(Network):
        def __init__(self) -> None:
            super().__init__()
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(()), persistent=False)
            self.history: list[int] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def count(self, number: int) -> None:
            self.history.append(number)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            self.count(len(x))
            return super().forward(x)

    def make() -> Job:
        network = Counting()
        compiled: Any = torch.compile(network, backend=sensitive)
        return Job(network, compiled, compiled)

    uninterrupted = anew(make)
    weights = uninterrupted.run(tmp_path / "uninterrupted")
    different, _, second = differences(make, tmp_path, STEPS_AN_EPOCH + 1, weights)
    expected: Any = uninterrupted.network
    network: Any = second.network
    assert different == []
    assert network.seen == expected.seen  # not persistent, kept all the same; the compiler here changes what is added
    assert len(network.history) == EPOCHS * STEPS_AN_EPOCH - STEPS_AN_EPOCH - 1


def test_the_same_run_goes_on_recording(tmp_path: Path) -> None:
    """Stopped before the short batch and after it: the file of the second stop has both calls."""
    weights = anew(of_module).run(tmp_path / "uninterrupted")
    for stop in (STEPS_AN_EPOCH - 1, STEPS_AN_EPOCH + 2):
        anew(of_module).run(tmp_path / "stopped", stop)
    job = anew(of_module)
    resumed = job.run(tmp_path / "stopped")
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())


# --- several ranks ---


def kept(*calls: tuple[str, bool]) -> bytes:
    import json

    common = {"how": "module", "training": "1", "in_ddp": True, "compiles": []}
    return "\n".join(json.dumps({"on": on, "grad": grad, **common}) for on, grad in calls).encode()


def heard(*said: bytes) -> Any:
    parts = [CompiledPart(each) for each in said]
    return parts[0].merge([part.say() for part in parts]).common


def test_ranks_make_as_many_calls() -> None:
    train, evaluate, other = ("model", True), ("model", False), ("disc", True)
    assert heard(b"", b"") == []
    assert heard(kept(train), kept(train, train)) == [2]
    assert heard(kept(train, evaluate), kept(train)) == [1], "an evaluation may be one rank's alone"
    assert heard(kept(train, other, other), kept(train, train, other)) == [2, 2]
    assert heard(kept(train, other), kept(other, train)) is None
    assert heard(kept(train), b"") is None
    assert len(calls_in(kept(train, train))) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_named_unless_it_always_runs_the_same_code() -> None:
    targets = {"model": nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 1))}
    unmanaged = Unmanaged("warn")
    tell_of_torchscript(targets, unmanaged)
    assert [note.partition(":")[0] for note in unmanaged.notes] == ["TorchScript runs model.0"]
    before = torch._C._jit_set_fusion_strategy([])
    try:
        unmanaged = Unmanaged("warn")
        tell_of_torchscript(targets, unmanaged)
        assert not unmanaged.notes
    finally:
        torch._C._jit_set_fusion_strategy(before)
