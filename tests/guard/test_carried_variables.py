"""A variable that goes on from step to step is told where it steers the training, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.guarded import Job, no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def update(job: Job, loss: torch.Tensor) -> None:
    loss.backward()
    job.optimizer.step()
    job.scheduler.step()
    job.optimizer.zero_grad()


def a_scale_that_decays(job: Job) -> str:
    noise = 0.1
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            out = job.network(x + noise * torch.randn(4))
            update(job, out.square().mean())
            noise *= 0.9
            job.guard.step_end()
    return "noise"


def a_count_that_sets_the_rate(job: Job) -> str:
    count = 0
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            count += 1
            for group in job.optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, count / 10)
            update(job, job.network(x).square().mean())
            job.guard.step_end()
    return "count"


def a_mean_that_decides_what_is_skipped(job: Job) -> str:
    mean = 1.0
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            mean = 0.9 * mean + 0.1 * loss.item()
            if loss.item() < 3 * mean:
                loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.guard.step_end()
    return "mean"


def a_baseline(job: Job) -> str:
    baseline = 0.0
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            value = job.network(x).mean(1)
            advantage = value.detach().mean() - baseline
            baseline = 0.9 * baseline + 0.1 * value.mean().item()
            loss = (value * advantage).mean()
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.guard.step_end()
    return "baseline"


def a_hidden_state(job: Job) -> str:
    hidden = torch.zeros(4, 4)
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            out = job.network(x + hidden)
            hidden = 0.5 * hidden + x
            update(job, out.square().mean())
            job.guard.step_end()
    return "hidden"


class Curriculum:
    def set_level(self, level: float) -> None:
        print(level)


def a_sum_that_raises_a_level(job: Job) -> str:
    curriculum = Curriculum()
    for _ in job.guard.epochs(3):
        total = 0.0
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            total += loss.item()
            job.guard.step_end()
        if total < 100.0:
            curriculum.set_level(0.5)
    return "total"


def a_sum_that_a_scheduler_gets(job: Job) -> str:
    steps: list[float] = []

    class Rule:
        def step(self, value: float) -> None:
            steps.append(value)

    rule = Rule()
    for _ in job.guard.epochs(3):
        total = 0.0
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            total += loss.item()
            update(job, loss)
            job.guard.step_end()
        rule.step(total / 5)
    return "total"


def a_patience(job: Job) -> str:
    best, bad = 0.0, 0
    for _ in job.guard.epochs(4):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            job.guard.step_end()
        if best > 1:
            bad = 0
        else:
            bad += 1
        if bad > 3:
            break
    return "bad"


class Walk:
    """A world of a reinforcement learner."""

    def __init__(self) -> None:
        self.place = 0.0

    def reset(self) -> np.ndarray[Any, Any]:
        self.place = 0.0
        return np.array([self.place] * 4, dtype=np.float32)

    def step(self, action: float) -> tuple[np.ndarray[Any, Any], float]:
        self.place += action
        return np.array([self.place] * 4, dtype=np.float32), -abs(self.place)


def an_observation(job: Job) -> str:
    world, memory = Walk(), []
    observation = world.reset()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            action = observation.sum() % 3 - 1
            following, reward = world.step(float(action))
            memory.append((observation, reward))
            observation = following
            seen = torch.tensor(np.stack([one for one, _ in memory[-4:]]))
            update(job, job.network(torch.cat([x, seen])).square().mean())
            job.guard.step_end()
    return "observation"


def a_last_loss(job: Job) -> str:
    last = 100.0
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            if loss.item() > last:
                for group in job.optimizer.param_groups:
                    group["lr"] *= 0.5
            last = loss.item()
            update(job, loss)
            job.guard.step_end()
    return "last"


steps_done = 0


def a_global_of_a_function(job: Job) -> str:
    def scale() -> float:
        global steps_done
        steps_done += 1
        return float(np.exp(-steps_done / 10))

    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean() * scale())
            job.guard.step_end()
    return "steps_done"


def a_variable_around_a_function(job: Job) -> str:
    scale = 1.0

    def scaled(loss: torch.Tensor) -> torch.Tensor:
        nonlocal scale
        scale *= 0.9
        return loss * scale

    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, scaled(job.network(x).square().mean()))
            job.guard.step_end()
    return "scale"


def a_variable_of_a_maker(job: Job) -> str:
    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        factor = 1.0

        def scaled(loss: torch.Tensor) -> torch.Tensor:
            nonlocal factor
            factor *= 0.9
            return loss * factor

        return scaled

    scaled = make()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, scaled(job.network(x).square().mean()))
            job.guard.step_end()
    return "factor"


def a_count_for_timms_schedulers(job: Job) -> str:
    class Schedule:
        def step_update(self, num_updates: int) -> None:
            for group in job.optimizer.param_groups:
                group["lr"] = 0.01 / num_updates

    num_updates, schedule = 0, Schedule()
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            num_updates += 1
            schedule.step_update(num_updates)
            job.guard.step_end()
    return "num_updates"


def a_first_loss(job: Job) -> str:
    first = None
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            if first is None:
                first = loss.item()
            update(job, loss / first)
            job.guard.step_end()
    return "first"


CARRIED: list[Callable[[Job], str]] = [
    a_scale_that_decays,
    a_count_that_sets_the_rate,
    a_mean_that_decides_what_is_skipped,
    a_baseline,
    a_hidden_state,
    a_sum_that_a_scheduler_gets,
    a_patience,
    an_observation,
    a_last_loss,
    a_global_of_a_function,
    a_variable_around_a_function,
    a_variable_of_a_maker,
    a_count_for_timms_schedulers,
    a_sum_that_raises_a_level,
]


@pytest.mark.parametrize("program", CARRIED)
def test_told(program: Callable[[Job], str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    with job.guard:
        name = program(job)
    told = [r.getMessage() for r in caplog.records if "goes on from step to step" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith(f"the variable {name} ({program.__name__}() in "), told
    assert "stateful={" in told[0]


def test_the_place_in_a_named_queue_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue, at = torch.zeros(12), 0
    job = Job(tmp_path, stateful={"queue": queue})
    with job.guard:
        for _ in job.guard.epochs(2):
            for x, _ in job.loader:
                y = job.network(x + queue.mean())
                update(job, y.square().mean())
                queue[at : at + 2] = y.detach().mean()
                at = (at + 2) % 12
                job.guard.step_end()
    told = [r.getMessage() for r in caplog.records if "is not kept" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("the variable at ("), told


def test_a_change_in_the_first_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stop may come before the next one: a run that is resumed there begins with the first value."""
    job = Job(tmp_path)
    x, scale = torch.randn(4, 4), 1.0
    with job.guard:
        for step in job.guard.steps(3):
            if step == 1:
                scale = scale * 0.5
            update(job, job.network(x * scale).square().mean())
            job.guard.step_end()
    told = [r.getMessage() for r in caplog.records if "goes on from step to step" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("the variable scale ("), told


def test_what_the_first_step_has_given_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    with job.guard:
        name = a_first_loss(job)
    told = [r.getMessage() for r in caplog.records if "keeps what the first step has given" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith(f"the variable {name} (a_first_loss() in "), told
    assert "stateful={" in told[0]


def best_by_max(job: Job, folder: Path) -> str:
    best = 0.0
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            job.guard.step_end()
        score = best + 1 - loss.item() / 100
        is_best = score > best
        best = max(score, best)
        if is_best:
            torch.save(job.network.state_dict(), folder / "best.pt")
    return "best"


def best_by_if(job: Job, folder: Path) -> str:
    lowest = float("inf")
    for epoch in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            job.guard.step_end()
        loss = 10.0 - epoch
        if loss < lowest:
            lowest = loss
            torch.save(job.network.state_dict(), folder / "best.pt")
    return "lowest"


def best_by_a_function(job: Job, folder: Path) -> str:
    best = -1.0

    def save_checkpoint(*, is_best: bool) -> None:
        if is_best:
            torch.save(job.network.state_dict(), folder / "best.pt")

    for epoch in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            job.guard.step_end()
        is_best = epoch > best
        best = max(best, float(epoch))
        save_checkpoint(is_best=is_best)
    return "best"


@pytest.mark.parametrize("program", [best_by_max, best_by_if, best_by_a_function])
def test_the_best_so_far_is_told_where_it_decides_what_is_saved(
    program: Callable[[Job, Path], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    with job.guard:
        name = program(job, tmp_path)
    (told,) = [r.getMessage() for r in caplog.records if "is not kept" in r.getMessage()]
    assert told.startswith(f"the variable {name} ({program.__name__}() in ") and "saved as the best" in told
    assert "guard.step" not in told


def logs(job: Job) -> None:
    running, seen, losses, smooth = 0.0, 0, [], 1.0
    for epoch in job.guard.epochs(3):
        correct = total = 0
        for number, (x, y) in enumerate(job.loader):
            out = job.network(x)
            loss = out.square().mean()
            running += loss.item()
            smooth = 0.9 * smooth + 0.1 * loss.item()
            seen += len(x)
            correct += int((out.argmax(1) == y).sum())
            total += len(y)
            losses.append(running)
            update(job, loss)
            job.guard.step_end(loss=loss)
            if number % 2 == 1:
                print(f"{epoch} {seen} {running / 2} {smooth:.3f}")
                running = 0.0
        accuracy = correct / total
        print("accuracy", accuracy)


def prints_what_not_every_step_sets(job: Job) -> None:
    for epoch in job.guard.epochs(3):
        for x, _ in job.loader:
            if epoch > 1:
                loss = job.network(x).square().mean()
                update(job, loss)
            job.guard.step_end()
            if epoch > 2:
                print(loss.item())


def saves_the_best(job: Job) -> None:
    best, best_epoch, files = 0.0, 0, []
    for epoch in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            job.guard.step_end()
        score = 1 - loss.item()
        is_best = score > best
        best = max(score, best)
        if is_best:
            best_epoch = epoch
            files.append(f"best-{best_epoch}-{best}.pt")


num_logged = 0


def counts_globally_for_a_log(job: Job) -> None:
    def note(loss: float) -> None:
        global num_logged
        num_logged += 1
        if num_logged % 2 == 0:
            print(num_logged, loss)

    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            loss = job.network(x).square().mean()
            update(job, loss)
            note(loss.item())
            job.guard.step_end()


def asks_the_guard(job: Job) -> None:
    """Behind the start, which has put it back."""
    place = 0.5 * job.guard.step
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x * (1 + 0.01 * place)).square().mean())
            place = place + 1
            job.guard.step_end()


def counts_from_the_guard(job: Job) -> None:
    count = job.guard.step
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            count += 1
            for group in job.optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, count / 10)
            update(job, job.network(x).square().mean())
            job.guard.step_end()


def counts_for_a_window(job: Job) -> None:
    micro = 0
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            for half in x.chunk(2):
                micro += 1
                job.network(half).square().mean().backward()
                if micro % 2 == 0:
                    job.optimizer.step()
                    job.optimizer.zero_grad()
            job.guard.step_end()


def evaluates_now_and_then(job: Job) -> None:
    count, history = 0, []
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            job.guard.step_end()
            count += 1
            if count % 4 == 0:
                with job.guard.outside_step(), torch.no_grad():
                    job.network.eval()
                    history.append((count, float(job.network(x).mean())))
                    job.network.train()


def ends_at_a_number_of_steps(job: Job) -> None:
    count, total = 0, 15
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            update(job, job.network(x).square().mean())
            count += 1
            job.guard.step_end()
            if count >= total:
                break


def sums_over_parts_of_a_step(job: Job) -> None:
    for _ in job.guard.epochs(3):
        for x, _ in job.loader:
            total: Any = 0
            for half in x.chunk(2):
                total = total + job.network(half).square().mean()
            update(job, total)
            job.guard.step_end()


def reads_ahead(job: Job) -> None:
    for _ in job.guard.epochs(3):
        batches = iter(job.loader)
        batch = next(batches)
        while batch is not None:
            loss = job.network(batch[0]).square().mean()
            batch = next(batches, None)
            update(job, loss)
            job.guard.step_end()


def swaps(job: Job) -> None:
    for _ in job.guard.epochs(3):
        batches = iter(job.loader)
        following = next(batches)[0]
        for _ in job.guard.steps(4, start=0):
            x, following = following, next(batches)[0]
            update(job, job.network(x).square().mean())
            job.guard.step_end()


@pytest.mark.parametrize(
    "program",
    [
        logs,
        prints_what_not_every_step_sets,
        saves_the_best,
        counts_from_the_guard,
        counts_globally_for_a_log,
        asks_the_guard,
        counts_for_a_window,
        evaluates_now_and_then,
        ends_at_a_number_of_steps,
        sums_over_parts_of_a_step,
        reads_ahead,
        swaps,
    ],
)
def test_left_alone(program: Callable[[Job], None], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    with job.guard:
        program(job)
    assert "goes on from step to step" not in caplog.text
