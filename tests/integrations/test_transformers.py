"""Jobs of Transformers' trainer, stopped by real signals and started again: as one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.errors import UsageError
from tests.integrations.stopping import by_seed, check, check_killed, run, written

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


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
    pytest.param(1, by_seed(2, 9), ["gradient_accumulation_steps=4"], id="accumulation, not whole", marks=drill),
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
    pytest.param(1, [["--stop-at", "7"]], ["torch_compile=True", "torch_compile_backend=aot_eager"], id="compiled",
                 marks=drill),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "stops", "settings"), CASES)
def test_a_training_goes_on_where_it_was_stopped(
    tmp_path: Path, ranks: int, stops: list[list[str]], settings: list[str]
) -> None:
    check("transformers", tmp_path, ranks, stops, ["--set", *settings])


@pytest.mark.drill
@pytest.mark.parametrize(
    ("ranks", "stop", "settings", "last"),
    [((1, 2), "12", ["num_train_epochs=3"], 21), ((2, 1), "4", ["max_steps=18"], 18)],
    ids=["more ranks, all epochs", "fewer ranks, all steps"],
)
def test_a_training_on_another_number_of_ranks_ends_where_it_should(
    tmp_path: Path, ranks: tuple[int, int], stop: str, settings: list[str], last: int
) -> None:
    """Its epochs have another number of steps: 10 on one rank, 5 on two."""
    options = ["--set", *settings]
    run("transformers", tmp_path, ranks[0], ["--stop-at", stop, *options], code=143 if ranks[0] == 1 else 1)
    resumed = run("transformers", tmp_path, ranks[1], options)
    assert {match[1] for match in resumed.matches(r"^HASH .* (\d+)$")} == {str(last)}, resumed.report()


@pytest.mark.drill
def test_a_training_that_was_stopped_early_stays_so(tmp_path: Path) -> None:
    options = ["--patience", "1", "--set", *_EVERY_EPOCH, "metric_for_best_model=loss", "learning_rate=0.0"]
    check("transformers", tmp_path, 1, [["--stop-at", "17"], ["--stop-at", "20", _IN_EVALUATION]], options)
    again = run("transformers", tmp_path / "stopped", 1, options)
    assert not again.matches("^STEP") and again.matches(r"^HASH \S+ 0 \S+ 20"), again.report()


@pytest.mark.drill
def test_a_training_that_is_over_goes_on_where_it_has_more_steps_now(tmp_path: Path) -> None:
    options = ["--set", "lr_scheduler_type=constant"]
    straight = run("transformers", tmp_path / "straight", 1, [*options, "num_train_epochs=4"])
    first = run("transformers", tmp_path / "extended", 1, [*options, "num_train_epochs=3"])
    again = run("transformers", tmp_path / "extended", 1, [*options, "num_train_epochs=3"])
    more = run("transformers", tmp_path / "extended", 1, [*options, "num_train_epochs=4"])
    assert not again.matches("^STEP") and again.matches("^HASH")[0].string == first.matches("^HASH")[0].string
    assert len(more.matches("^STEP")) == 10
    assert more.matches("^HASH")[0].string == straight.matches("^HASH")[0].string, more.report()


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
    check_killed("transformers", tmp_path, ranks, 6, ["--set", *_EVERY_4])


def trained(tmp_path: Path, settings: dict[str, Any], **arguments: Any) -> Any:
    """A trainer on two samples, after `train`."""
    from transformers import TrainingArguments

    from mindx_elastic.integrations.transformers import ElasticTrainer

    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, save_strategy="no", max_steps=2, **settings)
    data = {"train_dataset": [{"x": torch.ones(2)}] * 2, **arguments}
    trainer = ElasticTrainer(model=Small(), args=args, **data)
    trainer.train(resume_from_checkpoint=settings.get("resume_from_checkpoint"))
    return trainer


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": self.layer(x).sum()}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"x": torch.ones(2)}])


@pytest.mark.parametrize(
    ("settings", "arguments", "named"),
    [
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, {}, "enable_jit_checkpoint"),
        ({"ignore_data_skip": True}, {}, "ignore_data_skip"),
        ({"train_sampling_strategy": "batch_rebalance"}, {}, "batch_rebalance"),
        ({"optim": "schedule_free_adamw"}, {}, "schedule_free"),
        ({"optim": "lomo"}, {}, "lomo"),
        ({"resume_from_checkpoint": "other"}, {}, "nothing in elastic_directory"),
        ({"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches"),
        ({}, {"train_dataset": Stream()}, "a stream without positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        trained(tmp_path, settings, **arguments)


def test_an_unknown_release_without_the_private_places_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(UsageError, match=r"lacks Trainer\._run_epoch"):
        trained(tmp_path, {})
