"""A stop leaves the witness of the step behind it, and the resumed run compares: jobs in this very process."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from mindx_elastic import Guard
from mindx_elastic.config import RankInfo
from mindx_elastic.core.certificate import WITNESS_SUFFIX
from mindx_elastic.core.ports import Risks
from mindx_elastic.errors import ResumeDiffersError
from mindx_elastic.persist.storage import TEMP_SUFFIX
from mindx_elastic.prove import overlap, play_on
from mindx_elastic.start import loading
from mindx_elastic.start.restore import Resumed
from tests.guarded import STEPS_PER_EPOCH, Job, stop_at, stopped, weights_of_uninterrupted
from tests.harness import wait_until

STOP = 7  # in the middle of an epoch of five steps


pytestmark = pytest.mark.usefixtures("clean")


class Quiet(Job):
    """A job whose notes are no variables of the program: what a library's class keeps is left out."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **{"overlap": True, **options})
        self.steps, self.epochs = UserList[int](), UserList[int]()  # type: ignore[assignment]


def stop(directory: Path, *, middle: Callable[[Job, int], object] = lambda job, step: None, **options: Any) -> Job:
    """A job that gets a SIGTERM in step `STOP`. `middle`: also in each of its steps."""
    job = Quiet(directory, **options)
    signals = stop_at(STOP)

    def both(job: Job, step: int) -> None:
        middle(job, step)
        signals(job, step)

    left = stopped(job, middle=both)
    assert (left.code, left.step) == (143, STOP)
    return job


def resume(directory: Path, **options: Any) -> tuple[Job, dict[str, torch.Tensor]]:
    run = {name: options.pop(name) for name in ("begin", "middle", "after") if name in options}
    job = Quiet(directory, seed=1, **options)
    return job, job.run(**run)


def witness_in(directory: Path) -> Path:
    (path,) = directory.glob(f"*{WITNESS_SUFFIX}")
    return path


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if word in r.getMessage() and r.levelno >= logging.INFO]


def outcomes(directory: Path) -> list[str]:
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [event["outcome"] for event in events if event["event"] == "compared"]


def test_an_exact_job_is_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    expected = weights_of_uninterrupted(tmp_path)
    job = stop(tmp_path / "job")
    assert list(job.steps) == [*range(1, STOP + 2)], "one step more than is saved"
    assert witness_in(tmp_path / "job").name.startswith("job-2_2_breakpoint.safetensors")
    _, weights = resume(tmp_path / "job")
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert len(lines(caplog, f"verified: step {STOP + 1} is the one of the stopped process")) == 1
    assert outcomes(tmp_path / "job") == ["verified"]
    assert not lines(caplog, "not got back")


def test_accumulation_is_played_to_the_windows_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = Quiet(tmp_path, accumulate=2)
    left = stopped(job, middle=stop_at(5))
    assert left.step == 6 and job.steps[-1] == 8
    Quiet(tmp_path, seed=1, accumulate=2).run()
    assert lines(caplog, "verified: step 8 is"), caplog.text


def test_what_the_start_has_told_is_the_cause_of_a_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "code after step_end() draws": a rank whose file was damaged takes another one's, with new random numbers."""

    def as_of_another_rank(found: Resumed, rng: object, ranks: RankInfo, risks: Risks) -> Callable[[], None]:
        return how_to_restore(found._replace(donor=1), rng, ranks, risks)  # type: ignore[arg-type]

    stop(tmp_path)
    how_to_restore = loading._how_to_restore_rng
    monkeypatch.setattr(loading, "_how_to_restore_rng", as_of_another_rank)
    resume(tmp_path)
    (told,) = lines(caplog, "step 8 is not the one of the stopped process")
    assert "As the start has said: rank 0 has no usable file of step 7 and takes rank 1's" in told, told
    assert "usual cause" not in told, told


def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_OVERLAP", "0")
    job = Job(tmp_path)
    stopped(job, middle=stop_at(STOP))
    assert job.steps[-1] == STOP and not list(tmp_path.glob(f"*{WITNESS_SUFFIX}"))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (None, "step 8 is equal to the one of the stopped process; not got back: count (7, now 0)"),
        (
            0,
            "step 8 is not compared (enough), and the resumed run may differ by what goes on and is not kept: i, count",
        ),
    ],
)
def test_a_count_that_is_not_kept_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int | None, told: str
) -> None:
    """With both values; not after the program's own end. `code`: of its request; None: SIGTERM."""
    caplog.set_level(logging.INFO)
    job = Quiet(tmp_path)

    def stop_here(job: Job) -> None:
        if code is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            job.guard.request_stop("enough", code)
        wait_until(lambda: job.guard.stopper.agreed_step == STOP, "the agreement")

    def train(job: Job) -> None:
        count = 0
        with job.guard as guard:
            for _ in guard.epochs(3):
                for i, (x, y) in enumerate(job.loader):
                    scale = 2.0 if count % 100 == 99 or i == 99 else 1.0
                    (scale * torch.nn.functional.cross_entropy(job.network(x), y)).backward()
                    job.optimizer.step()
                    job.optimizer.zero_grad()
                    count += 1
                    if guard.step + 1 == STOP and guard.resumed_from_step is None:
                        stop_here(job)
                    guard.step_end()

    with pytest.raises(SystemExit):
        train(job)
    train(Quiet(tmp_path, seed=1))
    assert lines(caplog, told), caplog.text
    assert {each.levelno for each in caplog.records if told in each.getMessage()} == {logging.WARNING}, "it began again"
    assert outcomes(tmp_path) == (["variables differ"] if code != 0 else [])
    caplog.clear()
    train(Quiet(tmp_path, seed=1))  # it had finished
    assert not lines(caplog, "is not compared"), caplog.text
    assert lines(caplog, "no step was left after step 15, and code that follows may differ by what is not kept: count")


def test_a_number_that_the_guard_gives_is_no_count_from_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second batch of an epoch has the number 1, like the first one of a loop that counts by itself."""
    caplog.set_level(logging.INFO)

    def train(job: Job) -> None:
        with job.guard as guard:
            for _ in guard.epochs(3):
                for i, (x, y) in guard.enumerate(job.loader):
                    torch.nn.functional.cross_entropy(job.network(x), y).backward()
                    job.optimizer.step()
                    job.optimizer.zero_grad()
                    guard.step_end()
                    if guard.step == STEPS_PER_EPOCH + 1 and i == 0 and guard.resumed_from_step is None:
                        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        train(Quiet(tmp_path))
    train(Quiet(tmp_path, seed=1))
    assert lines(caplog, f"resumed from {tmp_path}") and not lines(caplog, "is not compared"), caplog.text


def test_a_step_whose_forwards_are_in_a_transform_is_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In `torch.func.grad` tensors have no bytes, the states of random streams included."""
    caplog.set_level(logging.INFO)

    def train(stop: int = 0) -> None:
        network = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        with Guard(model=network, optimizer=optimizer, directory=tmp_path, overlap=True) as guard:
            for step in guard.steps(9):
                weights, x = dict(network.named_parameters()), torch.rand(4, 3)
                found = torch.func.grad(lambda w, x: torch.func.functional_call(network, w, (x,)).sum())(weights, x)
                for name, parameter in weights.items():
                    parameter.grad = found[name]
                optimizer.step()
                if step == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                    wait_until(lambda: guard.stopper.agreed_step == stop, "the agreement")
                guard.step_end()

    with pytest.raises(SystemExit):
        train(STOP)
    train()
    assert lines(caplog, f"verified: step {STOP + 1} is"), caplog.text


def scaled_by(number: float) -> Callable[[Job, int], None]:
    """As a value of the program that a start has otherwise: it acts on the gradients of the step behind the stop."""

    def scale(job: Job, step: int) -> None:
        if step == STOP + 1:
            for parameter in job.network.parameters():
                if parameter.grad is not None:
                    parameter.grad *= number

    return scale


def test_a_witness_goes_with_its_checkpoint(tmp_path: Path) -> None:
    stop(tmp_path)
    first = witness_in(tmp_path)
    first.with_name(first.name.removesuffix(WITNESS_SUFFIX)).unlink()
    stop(tmp_path, seed=2, resume="never")
    assert witness_in(tmp_path).read_text() and not list(tmp_path.glob(f"*{TEMP_SUFFIX}"))


def test_another_step_ends_the_job_if_it_is_to(tmp_path: Path) -> None:
    stop(tmp_path)
    before = sorted(tmp_path.glob("*.safetensors"))
    with pytest.raises(ResumeDiffersError, match=f"step {STOP + 1} is not the one of the stopped process"):
        resume(tmp_path, middle=scaled_by(-1.0), on_difference="stop")
    assert sorted(tmp_path.glob("*.safetensors")) == before, "nothing is saved, and nothing is lost"
    resume(tmp_path, on_difference="stop")
    assert outcomes(tmp_path) == ["differs", "verified"], "the message's remedy: mended, it goes on"


def fail(job: Job, step: int) -> None:
    raise ValueError("only in the step that is played on")


def signal_again(job: Job, step: int) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    while True:  # until the step is interrupted
        time.sleep(0.01)


@pytest.mark.parametrize("fault", [fail, signal_again])
def test_whatever_happens_in_the_step_the_stop_is_as_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Job, int], object]
) -> None:
    monkeypatch.setattr(play_on, "_COMES_OUT_S", 60.0)  # else the process, which is pytest's, is ended then
    expected = weights_of_uninterrupted(tmp_path)
    fired = []

    def at_next(job: Job, step: int) -> None:
        if step == STOP + 1:
            fired.append(step)
            fault(job, step)

    stop(tmp_path / "job", middle=at_next)
    assert fired == [STOP + 1]
    assert not list((tmp_path / "job").glob(f"*{WITNESS_SUFFIX}"))
    _, weights = resume(tmp_path / "job")
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert not outcomes(tmp_path / "job"), "there is nothing to compare with"


def test_the_last_step_of_an_epoch_waits_for_the_code_behind_it(tmp_path: Path) -> None:
    between: list[int] = []
    job = Quiet(tmp_path)
    stopped(job, middle=stop_at(10), between=lambda job, epoch: between.append(epoch))
    assert between == [1, 2], "the stop waits for it"
    Quiet(tmp_path, seed=1).run(between=lambda job, epoch: between.append(epoch))
    assert between == [1, 2, 3]


def edit(path: Path, change: Callable[[list[str]], list[str]], *, seals: bool) -> None:
    """Change the lines of a witness. `seals`: with a true digest at the end."""
    text = change(path.read_text().splitlines(keepends=True))
    if seals:
        body = "".join(text[:-1])
        text[-1] = json.dumps({"digest": xxhash.xxh3_64_hexdigest(body.encode())}) + "\n"
    path.write_text("".join(text))


@pytest.mark.parametrize(
    ("change", "seals", "told"),
    [
        (lambda text: text[:-2], False, "left out of the comparison"),
        (lambda text: [*text[:2], text[2].replace("0", "1"), *text[3:]], False, "it is torn, or was changed"),
        (
            lambda text: [text[0].replace('"version": 3', '"version": 99'), *text[1:]],
            True,
            "is not compared: {} is of another version of this package",
        ),
        (
            lambda text: [text[0].replace('"world_size": 1', '"world_size": 3'), *text[1:]],
            True,
            "is not compared: {} is of 3 ranks, not 1",
        ),
    ],
)
def test_a_witness_that_is_damaged_or_of_another_job_is_named_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, seals: bool, told: str
) -> None:
    caplog.set_level(logging.INFO)
    stop(tmp_path)
    edit(witness_in(tmp_path), change, seals=seals)
    job, _ = resume(tmp_path)
    assert job.guard.resumed_from_step == STOP
    assert lines(caplog, told.format(witness_in(tmp_path).name)), caplog.text
    assert not outcomes(tmp_path)


def test_where_the_witness_cannot_be_written_the_checkpoint_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / f"job-2_2_breakpoint.safetensors{WITNESS_SUFFIX}"
    place.mkdir()
    stop(tmp_path)
    assert len(lines(caplog, "the witness of the next step cannot be written")) == 1
    job, _ = resume(tmp_path)
    assert job.guard.resumed_from_step == STOP


@pytest.mark.parametrize("place", ["state", "made_step"])
def test_a_look_that_raises_ends_nothing_but_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    expected = weights_of_uninterrupted(tmp_path)
    stop(tmp_path / "job")
    calls: list[str] = []

    def fail(*given: Any, **named: Any) -> None:
        calls.append(place)
        raise RuntimeError("a tensor of a kind of its own")

    monkeypatch.setattr(overlap.Comparison, place, fail)
    _, weights = resume(tmp_path / "job")
    assert calls and all(torch.equal(weights[name], value) for name, value in expected.items())
    assert lines(caplog, "a tensor of a kind of its own") and not outcomes(tmp_path / "job")
