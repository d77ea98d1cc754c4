"""What the head of the loop does a second time in a resumed epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.data import ResumableLoader
from tests.guard.program import BATCHES, Program, check
from tests.guarded import Points

pytestmark = pytest.mark.usefixtures("clean")


class Trainer:
    """An object of the program that has a loader."""

    def __init__(self, loader: object) -> None:
        self.loader, self.scale = loader, 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def test_what_it_sets_on_an_object_with_a_loader_is_undone(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        loader = ResumableLoader(Points(), 4, seed=0)
        return {"loader": loader, "stateful": {"trainer": Trainer(loader)}}

    def loop(p: Program) -> None:
        trainer = p.guard._targets["trainer"]
        for _ in p.guard.epochs(2):
            trainer.scale *= 0.5
            for x, y in p.loader:
                p.log.append(trainer.scale)
                p.train((trainer.scale * x, y))

    assert check(loop, tmp_path, (BATCHES + 3,), make=options).log[-1] == 0.25
