"""Jobs of Transformers' trainer, stopped by real signals and started again: as one that was never stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.harness import start_agent
from tests.integrations.stopping import check, run, written

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


def by_seed(seed: int, steps: int, rank: int = 0) -> list[list[str]]:
    """Three stops, at steps that the seed chooses."""
    chosen = sorted(random.Random(seed).sample(range(1, steps), 3))
    return [["--stop-at", str(step), "--stop-rank", str(rank)] for step in chosen]


_EVERY_4 = ["eval_strategy=steps", "eval_steps=4", "save_strategy=steps", "save_steps=4", "save_total_limit=2"]
_EVERY_EPOCH = ["eval_strategy=epoch", "save_strategy=epoch", "logging_strategy=epoch", "load_best_model_at_end=True"]
_PLATEAU = ["lr_scheduler_type=reduce_lr_on_plateau", "metric_for_best_model=loss"]
_IN_EVALUATION = "--stop-in-evaluation"
drill = pytest.mark.drill
CASES = [
    pytest.param(
        1, [["--stop-at", "8", _IN_EVALUATION]], [*_EVERY_4, "gradient_accumulation_steps=2"], id="in an evaluation"
    ),
    pytest.param(1, by_seed(1, 30), [], id="three stops", marks=drill),
    pytest.param(1, by_seed(2, 12), ["gradient_accumulation_steps=4"], id="accumulation, not whole", marks=drill),
    pytest.param(2, by_seed(3, 15, rank=1), _EVERY_EPOCH, id="2 ranks", marks=drill),
    pytest.param(2, [["--stop-at", "4", _IN_EVALUATION, "--stop-rank", "1"]], _EVERY_4, id="2 ranks, in an evaluation",
                 marks=drill),
    pytest.param(1, [["--stop-at", "10"]], [*_EVERY_EPOCH, *_PLATEAU], id="last step of an epoch", marks=drill),
    pytest.param(
        1, [["--stop-at", "20", _IN_EVALUATION]], [*_EVERY_EPOCH, *_PLATEAU], id="evaluation of an epoch", marks=drill
    ),
    pytest.param(1, by_seed(4, 30), ["dataloader_num_workers=2", "dataloader_persistent_workers=True"], id="workers",
                 marks=drill),
    pytest.param(
        1, by_seed(5, 13), ["max_steps=13", "neftune_noise_alpha=5", "label_smoothing_factor=0.1", "warmup_steps=3"],
        id="neftune, max_steps", marks=drill,
    ),
    pytest.param(1, by_seed(6, 30), ["train_sampling_strategy=group_by_length", "optim=adafactor", "bf16=True"],
                 id="grouped by length", marks=drill),
    pytest.param(1, by_seed(7, 30), ["torch_compile=True", "torch_compile_backend=aot_eager"], id="compiled",
                 marks=drill),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "stops", "settings"), CASES)
def test_a_training_goes_on_where_it_was_stopped(
    tmp_path: Path, ranks: int, stops: list[list[str]], settings: list[str]
) -> None:
    check("transformers", tmp_path, ranks, stops, ["--set", *settings])


@pytest.mark.drill
def test_a_training_that_was_stopped_early_stays_so(tmp_path: Path) -> None:
    options = ["--patience", "1", "--set", *_EVERY_EPOCH, "metric_for_best_model=loss", "learning_rate=0.0"]
    check("transformers", tmp_path, 1, [["--stop-at", "17"], ["--stop-at", "20", _IN_EVALUATION]], options)
    again = run("transformers", tmp_path / "stopped", 1, options)
    assert not again.matches("^STEP") and again.matches(r"^HASH \S+ 0 \S+ 20"), again.report()


@pytest.mark.drill
def test_an_exception_in_an_accumulation_window_costs_no_step(tmp_path: Path) -> None:
    options = ["--set", "gradient_accumulation_steps=2"]
    straight = run("transformers", tmp_path / "straight", 1, options)
    failed = run("transformers", tmp_path / "failed", 1, ["--raise-at", "6", *options], code=1)
    assert failed.matches("a fault of the program")
    resumed = run("transformers", tmp_path / "failed", 1, options)
    assert resumed.matches(r"resumed from .*step 6 "), resumed.report()
    assert written(failed, resumed) == written(straight)


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_costs_no_step_under_the_agent(tmp_path: Path, ranks: int) -> None:
    options = ["--set", *_EVERY_4]
    straight = run("transformers", tmp_path / "straight", ranks, options)
    kill = ["--kill", "--stop-at", "6", "--stop-rank", str(ranks - 1)]
    with start_agent(
        "integrations_transformers.py", tmp_path / "killed", *kill, *options, ranks=ranks, run_dir=tmp_path / "run"
    ) as job:
        job.expect(0)
    assert job.matches("^KILLED") and job.matches("resumed from"), job.report()
    assert written(job) == written(straight), job.report()
