"""What the program gives otherwise than the run that it resumes is told, and settings of the checkpoint go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, random_split

from mindx_elastic import Guard
from mindx_elastic.capture.given_settings import difference, listing_of

pytestmark = pytest.mark.usefixtures("clean")

Make = Callable[[Any], Any]


def train(directory: Path, steps: int, make: Make, rate: float = 0.1, *, again: Any = None) -> Any:
    """`again`: the objects of an earlier block of this process."""
    if again is None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        again = model, optimizer, make(optimizer)
    model, optimizer, scheduler = again
    with Guard(model=model, optimizer=optimizer, lr_scheduler=scheduler, directory=directory) as guard:
        for _ in guard.steps(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step(*[1.0] * isinstance(scheduler, lr.ReduceLROnPlateau))
            guard.step_end()
    return again


class Decay:
    """A schedule as a method, or as an object that is called."""

    def __init__(self, length: int) -> None:
        self.length, self.calls = length, 0

    def factor(self, step: int) -> float:
        self.calls += 1
        return 1 - step / (self.length + 1)

    __call__ = factor


def look_up(factors: list[float], step: int) -> float:
    return factors[step]


def cosine(length: int) -> Make:
    return lambda optimizer: lr.CosineAnnealingLR(optimizer, T_max=length)


def by_function(length: int) -> Make:
    return lambda optimizer: lr.LambdaLR(optimizer, lambda step: 1 - step / (length + 1))


def by_method(length: int) -> Make:
    return lambda optimizer: lr.LambdaLR(optimizer, Decay(length).factor)


def by_table(length: int) -> Make:
    table = partial(look_up, [0.5, *[1.0] * length])
    return lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=1), lr.LambdaLR(o, table)], [1])


def by_object(length: int) -> Make:
    return lambda o: lr.SequentialLR(o, [lr.LambdaLR(o, Decay(length)), lr.StepLR(o, 9)], [length])


def moved_by_hand(_: int) -> Make:
    """As programs do that have no scheduler: by a hook, so that the loop above stays as it is."""

    def move(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    return lambda optimizer: optimizer.register_step_post_hook(move) and None


def several(_: int) -> Make:
    def make(optimizer: Any) -> Any:
        cycle = lr.OneCycleLR(optimizer, 0.2, total_steps=9)
        decay = lr.LambdaLR(optimizer, lambda step: 0.9**step)
        return lr.ChainedScheduler([cycle, decay, lr.MultiStepLR(optimizer, [1, 3])])

    return make


KEPT, IN_THE_CODE = "goes on with the settings of the checkpoint: ", "goes on otherwise than its training began"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (cosine, rf"lr_scheduler {KEPT}.*T_max is 20 in the program and 9 in it"),
        (by_object, rf"{KEPT}milestones is \[20\] in .* \[9\] in it; length of function 0 .*is 20 in .* and 9 in it"),
        (by_function, rf"lr_scheduler {IN_THE_CODE}.*: factor at step 1 is 0.95\d* in the program and was 0.9"),
        (by_table, rf"{IN_THE_CODE}.* 10 of scheduler 1 is 1.0 .* was None"),
        (by_method, rf"{IN_THE_CODE}.* Decay.length is 20 in the program and was 9. To go on"),
        (moved_by_hand, ""),
        (several, ""),
    ],
)
def test_another_schedule(
    make: Callable[[int], Make], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the code alone once: from the changed start on the program's counts."""
    for steps in (1, 2, 3):
        train(tmp_path, steps, make(9))
    assert "goes on" not in caplog.text
    train(tmp_path, 4, make(20))
    assert re.search(told, caplog.text) if told else "goes on" not in caplog.text
    caplog.clear()
    train(tmp_path, 5, make(20))
    assert ("goes on" in caplog.text) == (make in (cosine, by_object))


def test_another_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, cosine(9))
    _, optimizer, _ = train(tmp_path, 4, cosine(9), 0.5)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    assert f"optimizer {KEPT}lr is 0.5 in the program and 0.0" in caplog.text
    assert "initial_lr is 0.5 in the program and 0.1 in it. To change" in caplog.text


def test_objects_that_have_trained_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cell of a notebook that is run again."""
    again = train(tmp_path, 4, lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=1))
    for _ in range(3):
        again[2].step(1.0)
    train(tmp_path, 6, lambda _: None, again=again)
    assert "goes on with the settings" not in caplog.text


# --- what a data set goes through ---


class Rows:
    """No sample is made to look at it."""

    def __init__(self, length: int = 3, **held: Any) -> None:
        self.length = length
        vars(self).update(held)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3) * index


class Table:
    """As one of pandas."""

    iloc = property(lambda self: self.rows)

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 3


def listing(**held: Any) -> Any:
    return listing_of({"dataset": Rows(**held), "collate_fn": SimpleNamespace(files=["a"])})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a/x", "a/y", "a/z"], ["b/x", "b/z", "b/y"]),
        (["a/x", "a/y", "b/x"], ["b/x", "b/y", "a/x"]),
        ([("a/x", "m/a"), ("b/x", "m/b"), ("c/x", "m/c")], [("b/x", "m/a"), ("a/x", "m/b"), ("c/x", "m/c")]),
        ([{"id": 1}, {"id": 2}, {"id": 3}], [{"id": 1}, {"id": 3}, {"id": 2}]),
        ([(torch.zeros(2), "a")] * 3, [(torch.ones(2), "a")] * 3),
        (np.eye(3), 2 * np.eye(3)),
        (torch.eye(3).bfloat16(), 2 * torch.eye(3).bfloat16()),
        (Table([1, 2, 3]), Table([1, 3, 2])),
    ],
)
def test_other_items(one: Any, other: Any) -> None:
    assert difference(listing(held=other), listing(held=one)).startswith("dataset.held has other items")
    assert not difference(listing(held=one), listing(held=one))


def test_other_indices_tensors_and_numbers_of_files() -> None:
    one, *others = (listing(indices=kind([1, 2, 3])) for kind in (list, np.array, torch.tensor))
    assert others == [one, one]
    assert difference(listing(indices=[1, 3, 2]), one).endswith("indices has other items, or has them in another order")
    of_tensors = [listing_of({"dataset": TensorDataset(torch.eye(3), torch.tensor(y))}) for y in ([1, 2, 3], [1, 3, 2])]
    assert "dataset.tensors[1] has other items" in difference(*of_tensors)
    files = listing(held=[Path("a/x")]), listing(held=[Path("a/x"), Path("a/y")])
    assert difference(*files) == "dataset.held has 1 items and had 2"


def test_what_is_not_compared() -> None:
    """Objects, numbers that are no rows, what hangs elsewhere, and lists that fail; folders, and signatures of URLs."""
    array, sparse = np.array([object()] * 3), torch.eye(3).to_sparse()
    assert not listing(objects=[object()] * 3, sizes=[224, 256], empty=[], indices=[], array=array, sparse=sparse)
    assert not listing(few=torch.eye(2), none=[None] * 3)
    held = [f"s3://shard/{number}.tar" for number in range(100_000)]
    found = listing(held=held)
    assert not difference(listing(held=[f"/scratch/job-7/{each[11:]}?signature=9" for each in held]), found)
    assert difference(listing(held=[*held[1:], held[0]]), found)


def over(directory: Path, steps: int, data: Any, seed: int = 0, **options: Any) -> None:
    torch.manual_seed(seed)
    model, loader = torch.nn.Linear(3, 1), DataLoader(data, 4, **options)
    with Guard(model=model, loader=loader, directory=directory) as guard:
        for _, rows in zip(range(steps), loader, strict=False):
            model(rows).sum().backward()
            guard.step_end()
        guard.save()


FILES: Any = Rows(100, samples=[f"/data/{number}" for number in range(100)])


def halves(seed: int) -> Any:
    return random_split(FILES, [50, 50], torch.Generator().manual_seed(seed))[0]


def test_another_division_of_the_data_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed, is_told in ((1, False), (1, False), (2, True), (2, False)):
        caplog.clear()
        over(tmp_path, 1, halves(seed), shuffle=True)
        told = "loader goes on over another data set than its training began with" in caplog.text
        assert told == ("dataset.indices has other items" in caplog.text) == is_told


def test_a_subset_that_a_sampler_draws(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for indices in (range(50), range(50, 100)):
        over(tmp_path, 1, FILES, sampler=SubsetRandomSampler([*indices]))
    assert "sampler.indices has other items" in caplog.text


def test_another_seed_is_told_and_the_runs_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in (3, 3, 4):
        assert "random numbers go on" not in caplog.text
        over(tmp_path, 1, FILES, seed)
    assert "torch's seed is 4 in the program and 3 in it" in caplog.text
    caplog.clear()
    over(tmp_path, 1, FILES, 3)
    over(tmp_path, 1, FILES, 1 << 40)  # as torch's own, where the program chooses none
    assert "random numbers go on" not in caplog.text
