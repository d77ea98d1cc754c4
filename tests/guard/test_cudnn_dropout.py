"""Dropout that cuDNN draws is named; where something else draws it, nothing is said. A stand-in says that weights are
on a device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from mindx_elastic.guard.checks.cudnn_dropout import tell_of_cudnn_dropout
from mindx_elastic.guard.unmanaged import Unmanaged


@pytest.mark.parametrize(
    ("module", "is_told"),
    [
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), True),
        (nn.GRU(4, 4, num_layers=2, dropout=0.1), True),
        (nn.LSTM(4, 4, num_layers=2), False),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1).eval(), False),
        (nn.Dropout(0.1), False),
    ],
)
@pytest.mark.parametrize("takes_cudnn", [True, False])
def test_what_is_told(module: nn.Module, is_told: bool, takes_cudnn: bool) -> None:
    unmanaged = Unmanaged("warn")
    on_device = mock.patch.object(torch.Tensor, "is_cuda", new=True)
    with on_device, mock.patch.object(torch.backends.cudnn, "is_acceptable", return_value=takes_cudnn):
        tell_of_cudnn_dropout({"model": nn.Sequential(nn.Linear(4, 4), module)}, unmanaged)
    assert bool(unmanaged.notes) == (is_told and takes_cudnn)
    assert all(note.startswith("model.1: cuDNN draws the dropout") for note in unmanaged.notes)
