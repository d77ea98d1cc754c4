"""One process, a loader that does not know its length, and code behind each epoch that reads its last loss.

``stream_tail.py DIRECTORY [--kill tail|next]``. Prints ``READY 0 pid resumed_from``, ``LOSS epoch loss`` and
``DONE 0 sha256``. ``--kill``: a fresh start kills itself with SIGKILL behind epoch 1, or in the first step behind it,
and says ``KILLED``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import mindx_elastic as mx
from tests.jobs.kit import digest_of, kill_here, say


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        draws = torch.Generator().manual_seed(1)
        return ((torch.randn(4, generator=draws), torch.tensor(n % 2)) for n in range(48))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--kill", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(), 8)
    with mx.Guard(model=model, optimizer=opt, loader=loader, directory=args.directory) as guard:
        say(f"READY 0 {os.getpid()} {guard.resumed_from_step}")
        may_die = guard.resumed_from_step is None
        for epoch in guard.epochs(3):
            for x, y in loader:
                opt.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                if may_die and args.kill == "next" and guard.step == 6:
                    kill_here(epoch)
                opt.step()
                guard.step_end()
            if may_die and args.kill == "tail":
                kill_here(epoch)
            say(f"LOSS {epoch} {float(loss).hex()}")
    say(f"DONE 0 {digest_of(model.parameters())}")


if __name__ == "__main__":
    main()
