"""Settings that are others than in the checkpoint are told, and the checkpoint's go on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, random_split

from mindx_elastic import Guard
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def train(
    directory: Path,
    steps: int,
    make: Callable[[Any], Any],
    **settings: Any,
) -> torch.optim.Optimizer:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    scheduler = make(optimizer)
    with Guard(model=model, optimizer=optimizer, lr_scheduler=scheduler, directory=directory) as guard:
        for _ in guard.steps(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            guard.step_end()
    return optimizer


def cosine(steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def test_another_rate_and_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, cosine(9), lr=0.1)
    optimizer = train(tmp_path, 4, cosine(20), lr=0.5)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    assert "optimizer goes on with the settings of the checkpoint: lr is 0.5 in the program and 0.0" in caplog.text
    assert "initial_lr is 0.5 in the program and 0.1 in it. To change" in caplog.text
    assert "T_max is 20 in the program and 9 in it" in caplog.text and "base_lrs is [0.5]" in caplog.text


def test_another_length_in_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def in_turn(optimizer: Any, steps: int) -> Any:
        parts = [lr_scheduler.LambdaLR(optimizer, Decay(steps)), lr_scheduler.StepLR(optimizer, 9)]
        return lr_scheduler.SequentialLR(optimizer, parts, [steps])

    for steps, length in ((2, 9), (3, 9), (4, 20)):
        assert "goes on with the settings" not in caplog.text
        train(tmp_path, steps, partial(in_turn, steps=length), lr=0.1)
    assert re.search("length of function 0 .*is 20 in the program and 9 in it", caplog.text)
    assert re.search(r"milestones is \[20\] in the program and \[9\] in it", caplog.text)


def moved_by_hand(optimizer: Any) -> None:
    """As programs do that have no scheduler: by a hook, so that the loop above stays as it is."""

    def move(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    optimizer.register_step_post_hook(move)


@pytest.mark.parametrize(
    "make",
    [
        moved_by_hand,
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9),
                lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
                lr_scheduler.MultiStepLR(optimizer, [1, 3]),
            ]
        ),
    ],
)
def test_the_same_settings(make: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (3, 5, 7):
        train(tmp_path, steps, make, lr=0.1)
    assert "goes on with the settings" not in caplog.text


def test_objects_that_have_trained_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cell of a notebook that is run again."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for steps in (4, 6):
        with Guard(model=model, optimizer=optimizer, lr_scheduler=scheduler, directory=tmp_path) as guard:
            for _ in guard.steps(steps):
                model(torch.ones(3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step(1.0)
                guard.step_end()
        for _ in range(3):
            scheduler.step(1.0)
    assert "goes on with the settings" not in caplog.text


def by_function(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (length + 1))


def by_table(*factors: float) -> Callable[[Any], Any]:
    def make(optimizer: Any) -> Any:
        first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
        return lr_scheduler.SequentialLR(
            optimizer, [first, lr_scheduler.LambdaLR(optimizer, partial(look_up, factors))], [1]
        )

    return make


def look_up(factors: tuple[float, ...], step: int) -> float:
    return factors[step]


class Decay:
    """A schedule as a method, or as an object that is called."""

    def __init__(self, length: int) -> None:
        self.length, self.calls = length, 0

    def factor(self, step: int) -> float:
        self.calls += 1
        return 1 - step / (self.length + 1)

    __call__ = factor


def by_method(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay(length).factor)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (
            {"make": by_function(8)},
            {"make": by_function(16)},
            r"^lr_scheduler goes on otherwise .*: factor at step 1 is 0.94\d* in the program and was 0.88",
        ),
        (
            {"make": by_table(0.5, 1, 1, 1)},
            {"make": by_table(0.5, 1, 1, 1, 1, 1)},
            "5 of scheduler 1 is 1.0 .* was None",
        ),
        ({"make": by_method(8)}, {"make": by_method(16)}, "Decay.length is 16 in the program and was 8. To go on"),
    ],
)
def test_another_function_in_the_code(
    before: dict[str, Any], now: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: from the changed start on the program's count."""
    for steps, given in enumerate((before, before), start=1):
        train(tmp_path, steps, **{"make": cosine(9), **given}, lr=0.1)
    assert "otherwise" not in caplog.text
    for steps in (3, 4):
        train(tmp_path, steps, **{"make": cosine(9), **now}, lr=0.1)
        (line,) = (line for line in caplog.messages if "otherwise than its training began" in line)
    assert re.search(told, line), line


class Files(Dataset[Any]):
    """No sample is made to look at it."""

    def __init__(self, names: list[str]) -> None:
        self.samples = [(name, number % 2) for number, name in enumerate(names)]
        self.caption = "train"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3) * int(self.samples[index][0].rpartition("/")[2])


def over(directory: Path, steps: int, data: Dataset[Any], seed: int = 0, **options: Any) -> None:
    torch.manual_seed(seed)
    model, loader = torch.nn.Linear(3, 1), DataLoader(data, 4, **options)
    with Guard(model=model, loader=loader, directory=directory) as guard:
        for _, rows in zip(range(steps), loader, strict=False):
            model(rows).sum().backward()
            guard.step_end()
        guard.save()


def listed_in(folder: str, first: int = 0) -> Files:
    return Files([f"{folder}/images/{number}" for number in [*range(first, 100), *range(first)]])


def halves(seed: int) -> Dataset[Any]:
    return random_split(listed_in("/data"), [50, 50], torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize(
    ("begun", "same", "other", "told"),
    [
        (
            partial(listed_in, "/data"),
            partial(listed_in, "/tmp/other/place"),
            partial(listed_in, "/data", 3),
            "dataset.samples has other items, or has them in another order",
        ),
        (partial(halves, 1), partial(halves, 1), partial(halves, 2), "dataset.indices has other items"),
    ],
)
def test_another_data_set_is_told_once(
    begun: Callable[[], Any],
    same: Callable[[], Any],
    other: Callable[[], Any],
    told: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Files in another order, another division; not another folder of the same files."""
    over(tmp_path, 2, begun(), shuffle=True)
    over(tmp_path, 1, same(), shuffle=True)
    assert "another data set" not in caplog.text
    over(tmp_path, 1, other(), shuffle=True)
    assert re.search(f"loader goes on over another data set .*{told}", caplog.text)
    caplog.clear()
    over(tmp_path, 1, other(), shuffle=True)
    assert "another data set" not in caplog.text


def test_a_subset_that_a_sampler_draws(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for indices in (range(50), range(50, 100)):
        over(tmp_path, 1, listed_in("/data"), sampler=SubsetRandomSampler([*indices]))
    assert "sampler.indices has other items" in caplog.text


def test_another_seed_is_told_and_the_runs_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in (3, 3, 4):
        assert "random numbers go on" not in caplog.text
        over(tmp_path, 1, listed_in("/data"), seed)
    assert "torch's seed is 4 in the program and 3 in it" in caplog.text
    caplog.clear()
    over(tmp_path, 1, listed_in("/data"), 3)
    over(tmp_path, 1, listed_in("/data"), 1 << 40)  # as torch's own, where the program chooses none
    assert "random numbers go on" not in caplog.text
