"""`Model.train` on several ranks without a callback that saves; rank 1 cannot start the first training.

Prints ``REFUSED rank steps class message``, then ``TRAINED rank steps`` of a second training, which all ranks start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mindx_elastic as mx
from mindx_elastic.guard.policy import ExitPolicy
from tests.jobs.kit import say
from tests.jobs.loop import build_network


class Broken(mx.Callback):
    """Fails behind the meeting over the ranks' callbacks."""

    def exit_policies(self) -> Sequence[ExitPolicy]:
        raise RuntimeError("injected behind the meeting")


class Steps(mx.Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_train_step_end(self, run_context: mx.RunContext) -> None:
        self.count += 1


def main() -> None:
    rank, steps = int(os.environ["RANK"]), Steps()
    network = build_network()
    model = mx.Model(network, nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), lr=0.01))
    loader = mx.data.ResumableLoader(TensorDataset(torch.randn(20, 24), torch.arange(20) % 5), batch_size=5)
    try:
        model.train(1, loader, callbacks=[steps, Broken()] if rank == 1 else [steps], progress=False)
    except Exception as error:
        say(f"REFUSED {rank} {steps.count} {type(error).__name__} {error}")
    model.train(1, loader, callbacks=[steps], progress=False)
    say(f"TRAINED {rank} {steps.count}")


if __name__ == "__main__":
    main()
