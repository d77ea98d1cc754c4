"""Metrics of an evaluation: by name, as a function, or as an object in MindSpore's form.

The built-in ones add up float64 sums on the device, without waiting for it, and are reduced over the ranks by one
all-reduce of all sums at the end; so the result counts every sample once, however unevenly the ranks are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from mindx_elastic.capture.plain_component import is_stateful
from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError

__all__ = [
    "Metric",
    "MetricSet",
    "Metrics",
    "ObjectMetric",
    "SumMetric",
    "top_k",
]


@runtime_checkable
class Metric(Protocol):
    """MindSpore's form of a metric."""

    def clear(self) -> None: ...
    def update(self, *inputs: Any) -> None: ...
    def eval(self) -> Any: ...


MetricSpec: TypeAlias = "str | Metric | Callable[[Any, Any], Any]"
Measure: TypeAlias = "Callable[[Tensor | None, Any, Any, int], tuple[Any, Any]]"
Metrics: TypeAlias = "MetricSpec | Iterable[MetricSpec] | Mapping[str, MetricSpec] | None"


class SumMetric:
    """A mean of per-sample values: a sum and a weight, both float64.

    `measure` gives both of one batch, from (loss or None, outputs, targets, number of samples): numbers or 0-dim
    tensors.
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.sums = torch.zeros(2, dtype=torch.float64, device="cpu")

    def clear(self) -> None:
        self.sums = torch.zeros_like(self.sums)

    @torch.no_grad()
    def add(self, loss: Tensor | None, outputs: Any, targets: Any, size: int) -> None:
        total, weight = self.measure(loss, outputs, targets, size)
        if isinstance(total, Tensor):
            if self.sums.device != total.device:
                self.sums = self.sums.to(total.device)
            self.sums[0] += total.double()
        else:
            self.sums[0] += float(total)
        self.sums[1] += weight

    def eval(self) -> float:
        """The mean so far; nan when nothing was added. Waits for the device."""
        total, weight = self.sums.tolist()
        return float(total / weight) if weight else float("nan")


def _loss(loss: Tensor | None, outputs: Any, targets: Any, size: int) -> tuple[Any, Any]:
    """The mean loss over the samples: the batches' mean losses, weighted by their sizes."""
    if loss is None:
        raise UsageError('the metric "loss" needs a loss: give Model a loss_fn, or an eval_step that returns one')
    return loss * size, size


def top_k(k: int, name: str) -> Measure:
    """The share of samples whose target (class indices, or one-hot rows) is among the `k` highest outputs of
    dimension 1."""

    def measure(loss: Tensor | None, outputs: Any, targets: Any, size: int) -> tuple[Any, Any]:
        scores, wanted = _scores(outputs, targets, name)
        best = scores.argmax(1, keepdim=True) if k == 1 else scores.topk(min(k, scores.shape[1]), dim=1).indices
        return (best == wanted.unsqueeze(1)).sum(), wanted.numel()

    return measure


def _mean_of(function: Callable[[Any, Any], Any]) -> Measure:
    """The mean, weighted by the batches' sizes, of ``function(outputs, targets)``: a number or a 0-dim tensor."""

    def measure(loss: Tensor | None, outputs: Any, targets: Any, size: int) -> tuple[Any, Any]:
        value = function(outputs, targets)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise UsageError(
                f"a metric function returned a tensor of shape {list(value.shape)}; return one number, the batch's mean"
            )
        return (value.reshape(()) if isinstance(value, Tensor) else float(value)) * size, size

    return measure


class ObjectMetric:
    """A user's object with clear, update(outputs, targets) and eval. Not reduced over the ranks."""

    def __init__(self, inner: Metric) -> None:
        self.inner = inner

    def clear(self) -> None:
        self.inner.clear()

    def add(self, loss: Tensor | None, outputs: Any, targets: Any, size: int) -> None:
        self.inner.update(outputs, targets)

    def eval(self) -> Any:
        return self.inner.eval()


_NAMES: dict[str, Measure] = {
    "accuracy": top_k(1, "accuracy"),
    "acc": top_k(1, "acc"),
    "loss": _loss,
    "top1": top_k(1, "top1"),
    "top5": top_k(5, "top5"),
    "top_1_accuracy": top_k(1, "top1"),
    "top_5_accuracy": top_k(5, "top5"),
    "mae": _mean_of(lambda outputs, targets: (outputs - targets).abs().double().mean()),
    "mse": _mean_of(lambda outputs, targets: (outputs - targets).double().square().mean()),
}


class MetricSet:
    """The metrics of one `Model`, by name. Raises UsageError for what is not a metric."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics: dict[str, SumMetric | ObjectMetric] = {name: _build(spec) for name, spec in _named(metrics)}
        self._warned = False

    def clear(self) -> None:
        for metric in self.metrics.values():
            metric.clear()

    def add(self, loss: Tensor | None, outputs: Any, targets: Any, size: int) -> None:
        """One batch of `size` samples."""
        for metric in self.metrics.values():
            metric.add(loss, outputs, targets, size)

    def results(self, all_sum: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
        """All values. `all_sum` adds a tensor up over the ranks; None: there is one rank."""
        summed = [metric for metric in self.metrics.values() if isinstance(metric, SumMetric)]
        if all_sum is not None:
            if summed:
                device = summed[0].sums.device
                total = all_sum(torch.stack([metric.sums.to(device) for metric in summed]))
                for metric, sums in zip(summed, total, strict=True):
                    metric.sums = sums.clone()
            if len(summed) < len(self.metrics) and not self._warned:
                self._warned = True
                logger.warning("metrics that are objects of your own count this rank's samples only")
        return {name: metric.eval() for name, metric in self.metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Of objects of the program's own that have one: each evaluation clears the others."""
        return {name: part.state_dict() for name, part in self._stateful()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._stateful():
            if name in state:
                part.load_state_dict(state[name])

    def _stateful(self) -> list[tuple[str, Any]]:
        parts = [(name, each.inner) for name, each in self.metrics.items() if isinstance(each, ObjectMetric)]
        return [(name, part) for name, part in parts if is_stateful(part)]


def _named(metrics: Any) -> list[tuple[str, Any]]:
    if metrics is None:
        return []
    if isinstance(metrics, Mapping):
        return [(str(name), spec) for name, spec in metrics.items()]
    if isinstance(metrics, str) or callable(metrics) or isinstance(metrics, Metric):
        metrics = [metrics]
    if not isinstance(metrics, Iterable):
        raise UsageError(f"metrics={metrics!r}; give names, functions (outputs, targets) or a dict of them")
    specs = list(metrics)
    if isinstance(metrics, (set, frozenset)) and all(isinstance(spec, str) for spec in specs):
        specs.sort()
    named: list[tuple[str, Any]] = []
    for spec in specs:
        name = spec if isinstance(spec, str) else getattr(spec, "__name__", type(spec).__name__)
        if name in dict(named):
            raise UsageError(f"two metrics are called {name!r}; give a dict with a name for each")
        named.append((name, spec))
    return named


def _build(spec: Any) -> SumMetric | ObjectMetric:
    if isinstance(spec, str):
        if spec not in _NAMES:
            raise UsageError(f"there is no metric {spec!r}; known are {', '.join(_NAMES)}, or give a function")
        return SumMetric(_NAMES[spec])
    if isinstance(spec, type):
        raise UsageError(f"the metric {spec.__name__} is a class; make an object of it: {spec.__name__}()")
    if isinstance(spec, SumMetric):
        return spec
    if isinstance(spec, Metric):
        return ObjectMetric(spec)
    if callable(spec):
        return SumMetric(_mean_of(spec))
    raise UsageError(f"{spec!r} is not a metric; give a name, a function (outputs, targets), or clear/update/eval")


def _scores(outputs: Any, targets: Any, name: str) -> tuple[Tensor, Tensor]:
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.dim() >= 2:
        if targets.dim() == outputs.dim() - 1:
            return outputs, targets
        if targets.shape == outputs.shape:
            return outputs, targets.argmax(1)
    shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (outputs, targets)]
    raise UsageError(
        f"the metric {name!r} needs outputs of shape [batch, classes, ...] and targets [batch, ...] or one-hot, not "
        f"{shapes[0]} and {shapes[1]}; pass a function (outputs, targets) instead"
    )
