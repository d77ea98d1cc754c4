"""Which parameters' memory the state of another object shares."""

from __future__ import annotations

import torch
from torch import nn

from mindx_elastic.capture.names import places_in_states


def test_the_places_of_parameters_in_the_states_of_others() -> None:
    kept, copied = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    states = {"ema": {"weights": [copied.detach().clone(), kept.detach()]}, "plain": {"weight": kept.data}}
    found = places_in_states(states, [kept, copied])
    assert found.keys() == {"ema.weights.1", "plain.weight"} and all(value is kept for value in found.values())
