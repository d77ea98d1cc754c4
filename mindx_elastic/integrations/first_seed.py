"""The order of a training's data where the program has chosen no seed, or another one than the run it goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindx_elastic.data import ReplayLoader, ResumableLoader

__all__ = ["keep_first_seed"]


class _Resumable(ResumableLoader):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if isinstance(state.get("seed"), int):
            self.seed = self._sampler.seed = state["seed"]
        super().load_state_dict(state)


class _Replay(ReplayLoader):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if isinstance(state.get("seed"), int):
            self.seed = state["seed"]
        super().load_state_dict(state)


def keep_first_seed(loader: Any) -> Any:
    """Let `loader`, which was made for the program and has the seed of torch's stream, take over the seed of the run
    that it resumes, in place of the refusal that an own loader of the program's has. Returns it."""
    for kind in (_Resumable, _Replay):
        if type(loader) is kind.__mro__[1]:
            loader.__class__ = kind
    return loader
