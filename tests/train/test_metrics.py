from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mindx_elastic.errors import UsageError
from mindx_elastic.train.metrics import MetricSet, SumMetric, top_k

OUTPUTS = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5]])
TARGETS = torch.tensor([1, 0, 0])


class Count:
    """A metric in MindSpore's form."""

    def __init__(self) -> None:
        self.n = 0

    def clear(self) -> None:
        self.n = 0

    def update(self, *inputs: Any) -> None:
        self.n += len(inputs[1])

    def eval(self) -> int:
        return self.n


def mean_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).float().mean()


def results(metrics: Any, **kwargs: Any) -> dict[str, Any]:
    made = MetricSet(metrics)
    made.add(kwargs.pop("loss", torch.tensor(0.5)), OUTPUTS, TARGETS, 3)
    return made.results(None)


def test_topk() -> None:
    metric = SumMetric(top_k(2, "top2"))
    metric.add(None, OUTPUTS, torch.tensor([0, 2, 2]), 3)
    assert metric.eval() == pytest.approx(2 / 3)  # ties go to the lower class


def test_functions_objects_and_names_mix() -> None:
    found = results(["loss", mean_error, Count()])
    assert found == {"loss": 0.5, "mean_error": pytest.approx(1 / 3), "Count": 3}
    assert results({"err": mean_error, "n": Count()}) == {"err": pytest.approx(1 / 3), "n": 3}
    assert results(mean_error) == {"mean_error": pytest.approx(1 / 3)}


def test_one_hot_targets_and_segmentation() -> None:
    metric = SumMetric(top_k(1, "accuracy"))
    metric.add(None, OUTPUTS, torch.nn.functional.one_hot(TARGETS, 3), 3)
    assert metric.eval() == pytest.approx(2 / 3)
    metric.clear()
    metric.add(None, torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), 2)
    assert metric.eval() == 1.0


def test_regression_errors() -> None:
    made = MetricSet({"mae", "mse"})
    made.add(None, torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]), 2)
    assert made.results(None) == {"mae": 1.5, "mse": 2.5}


def test_reduced_over_ranks_by_one_sum(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Tensor] = []

    def all_sum(value: Tensor) -> Tensor:
        calls.append(value)
        return value + torch.tensor([[0.0, 3.0], [1.5, 3.0]])

    made = MetricSet({"accuracy": "accuracy", "loss": "loss", "n": Count()})
    made.add(torch.tensor(0.5), OUTPUTS, TARGETS, 3)
    assert made.results(all_sum) == {"accuracy": pytest.approx(1 / 3), "loss": 0.5, "n": 3}
    assert len(calls) == 1
    assert "this rank's samples only" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["nope"], "no metric 'nope'"),
        (3, "metrics=3"),
        ([Count], "is a class"),
        (["accuracy", "accuracy"], "two metrics"),
        ([object()], "is not a metric"),
    ],
)
def test_what_is_not_a_metric_is_refused(metrics: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MetricSet(metrics)


def test_a_set_of_names_has_one_order_whatever_the_hashes_are() -> None:
    names = {"accuracy", "acc", "loss", "top1", "top5", "top_1_accuracy", "top_5_accuracy", "mae", "mse"}
    assert list(MetricSet(names).metrics) == sorted(names)
