"""Elastic training for PyTorch: stop anywhere, resume bit for bit.

The public names are imported when they are first used (PEP 562): `mindx-elastic --help` must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mindx_elastic.core.first_process import end_on_sigterm as _end_on_sigterm
from mindx_elastic.core.ports import provide as _provide

if TYPE_CHECKING:
    from mindx_elastic import cluster as cluster
    from mindx_elastic import data as data
    from mindx_elastic import errors as errors
    from mindx_elastic.capture.adapters import attributes as attributes
    from mindx_elastic.errors import GracefulExit as GracefulExit
    from mindx_elastic.guard.guard import Guard as Guard
    from mindx_elastic.guard.policy import ExitPolicy as ExitPolicy
    from mindx_elastic.guard.policy import PeriodicPolicy as PeriodicPolicy
    from mindx_elastic.plan import Layout as Layout
    from mindx_elastic.plan import get_ckpt_path_with_strategy as get_ckpt_path_with_strategy
    from mindx_elastic.plan import merge_strategies as merge_strategies
    from mindx_elastic.plan import restore_group_info_list as restore_group_info_list
    from mindx_elastic.train import Callback as Callback
    from mindx_elastic.train import CheckpointConfig as CheckpointConfig
    from mindx_elastic.train import ExceptionCheckpoint as ExceptionCheckpoint
    from mindx_elastic.train import LossMonitor as LossMonitor
    from mindx_elastic.train import Model as Model
    from mindx_elastic.train import ModelCheckpoint as ModelCheckpoint
    from mindx_elastic.train import OnRequestExit as OnRequestExit
    from mindx_elastic.train import OptTFTWrapper as OptTFTWrapper
    from mindx_elastic.train import RunContext as RunContext
    from mindx_elastic.train import TFTRegister as TFTRegister
    from mindx_elastic.train import TimeMonitor as TimeMonitor

_HOME = {
    "Callback": "mindx_elastic.train",
    "CheckpointConfig": "mindx_elastic.train",
    "ExceptionCheckpoint": "mindx_elastic.train",
    "ExitPolicy": "mindx_elastic.guard.policy",
    "GracefulExit": "mindx_elastic.errors",
    "Guard": "mindx_elastic.guard.guard",
    "Layout": "mindx_elastic.plan",
    "LossMonitor": "mindx_elastic.train",
    "Model": "mindx_elastic.train",
    "ModelCheckpoint": "mindx_elastic.train",
    "OnRequestExit": "mindx_elastic.train",
    "OptTFTWrapper": "mindx_elastic.train",
    "PeriodicPolicy": "mindx_elastic.guard.policy",
    "RunContext": "mindx_elastic.train",
    "TFTRegister": "mindx_elastic.train",
    "TimeMonitor": "mindx_elastic.train",
    "attributes": "mindx_elastic.capture.adapters",
    "cluster": "",
    "data": "",
    "errors": "",
    "get_ckpt_path_with_strategy": "mindx_elastic.plan",
    "merge_strategies": "mindx_elastic.plan",
    "restore_group_info_list": "mindx_elastic.plan",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    value = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_provide("observers", "mindx_elastic.prove.observers")
_end_on_sigterm()
