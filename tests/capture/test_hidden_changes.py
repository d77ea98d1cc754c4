"""What a sample of the parameters shows, and what version counters do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.weight_samples import HiddenChanges, WeightSamples


def samples_of(parameters: list[nn.Parameter]) -> WeightSamples:
    return WeightSamples(Collector({"model": nn.ParameterList(parameters)}))


def by_data(p: nn.Parameter) -> None:
    p.data.mul_(0.5)


def by_other_data(p: nn.Parameter) -> None:
    p.data = p.data * 0.5


def counted(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def as_before(p: nn.Parameter) -> None:
    p.data = p.data.clone()


@pytest.mark.parametrize(("change", "count"), [(by_data, 1), (by_other_data, 1), (counted, 0), (as_before, 0)])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (2, 3, 4, 4)])
def test_what_no_counter_shows_is_counted(
    change: Callable[[nn.Parameter], None], count: int, shape: tuple[int, ...]
) -> None:
    first = torch.ones(shape, dtype=torch.bfloat16)
    if len(shape) == 4:
        first = first.to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(first), nn.Parameter(torch.full((2,), float("nan"))), nn.Parameter(torch.empty(0))]
    samples = samples_of(parameters)
    before = samples.take()
    assert samples.num_hidden(before) == 0
    change(parameters[0])
    assert samples.num_hidden(before) == count


def test_elements_of_parameters_with_gaps_and_of_inference_are_compared() -> None:
    with torch.inference_mode():
        frozen = nn.Parameter(torch.ones(9), requires_grad=False)
    transposed = nn.Parameter(torch.ones(4, 6).t())
    samples = samples_of([frozen, transposed])
    before = samples.take()
    assert samples.num_hidden(before) == 0
    by_data(transposed)
    assert samples.num_hidden(before) == 1 and samples.changed_since(before) == ["model"]


def test_other_parameters_are_not_compared() -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(3))])
    collector = Collector({"model": module})
    samples = WeightSamples(collector)
    before = samples.take()
    module.register_parameter("more", nn.Parameter(torch.ones(2)))
    module.get_parameter("0").data.zero_()
    assert samples.num_hidden(before) == 0


def test_once_seen_every_boundary_is_compared() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    hidden = HiddenChanges(samples_of(parameters), lambda: None)
    for step in range(7):
        hidden.at_boundary(step)
        assert not hidden.before_update()
        by_data(parameters[0])  # behind the update: the gate is not clean then
    for step in range(7, 48):
        hidden.at_boundary(step)
        by_data(parameters[0])
        assert not hidden.before_update(), "most steps are not looked at"
    hidden.at_boundary(49)
    by_data(parameters[0])
    assert hidden.before_update()
    hidden.at_boundary(60)
    assert hidden.problem() is None
    by_data(parameters[0])
    assert "1 parameters were changed" in str(hidden.problem())


def test_without_an_optimizer_boundaries_are_compared() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    hidden = HiddenChanges(samples_of(parameters), lambda: None, are_likely=True)
    assert not any(hidden.at_boundary(step) for step in range(9))
    assert hidden.problem() is None
    by_data(parameters[0])
    assert "1 parameters were changed" in str(hidden.problem())
    assert hidden.at_boundary(9), "snapshots are to be taken at once from here on"
