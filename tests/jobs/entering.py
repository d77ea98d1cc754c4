"""Ranks that enter guards one after the other; in each, one rank cannot. Says on every rank what came of it.

Prints ``REFUSED fault rank class message`` for each fault, then ``ENTERED rank``: the last guard is entered by all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import mindx_elastic as mx
from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.guard import guard as guard_module
from tests.jobs.kit import say


class Unsupported:
    """A user's object of which only one rank's state cannot be saved."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Disk:
    """An error that no code of ours foresees."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")


def enter(fault: str, victim: bool, directory: Path) -> None:
    """`fault` strikes the victim only."""
    options: dict[str, Any] = {"directory": directory, "stateful": {"mine": Unsupported(1)}}
    grace, listening = os.environ.pop("MINDX_GRACE_S", None), getattr(guard_module, "Listeners")  # noqa: B009
    if victim and fault == "environment":
        os.environ["MINDX_GRACE_S"] = "soon"
    if victim and fault == "directory":
        file = directory / "a_file"
        file.touch()
        options["directory"] = file
    if victim and fault == "state":
        options["stateful"] = {"mine": Unsupported(object())}
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    loose = [nn.Parameter(torch.zeros(1))] if victim and fault == "optimizer" else []
    options["optimizer"] = torch.optim.SGD([*model.parameters(), *loose], lr=0.1)
    if victim and fault == "layout":
        options["layouts"] = {"model.*": Layout((64,), (parse_placement("replicate"),))}
    if victim and fault == "last":
        mock.patch.object(guard_module, "Listeners", Disk).start()
    if victim and fault == "copies":
        options["redundancy"] = 2
    try:
        with mx.Guard(model=model, **options):
            say(f"ENTERED {dist.get_rank()}")
    except Exception as error:
        say(f"REFUSED {fault} {dist.get_rank()} {type(error).__name__} {str(error).splitlines()[0]}")
    finally:
        os.environ.pop("MINDX_GRACE_S", None)
        os.environ.update({} if grace is None else {"MINDX_GRACE_S": grace})
        mock.patch.object(guard_module, "Listeners", listening).start()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, victim = Path(sys.argv[1]), int(sys.argv[2])
    directory.mkdir(exist_ok=True)
    for fault in (*sys.argv[3:], "none"):
        enter(fault, dist.get_rank() == victim, directory)
    dist.barrier()  # nobody's end may be what ended the others' wait
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
