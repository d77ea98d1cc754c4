"""Works out what each rank of a new start reads, from the files that are there and the devices that have failed.

The names below are for programs of their own; a job that uses `Guard` needs none but `Layout`. They are imported when
they are first used: strategy files need protobuf, which a training job does without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindx_elastic.core.layout import Layout as Layout
    from mindx_elastic.core.strategy import Strategy as Strategy
    from mindx_elastic.core.strategy import TensorSpec as TensorSpec
    from mindx_elastic.platforms.group_info import get_ckpt_path_with_strategy as get_ckpt_path_with_strategy
    from mindx_elastic.platforms.group_info import restore_group_info_list as restore_group_info_list
    from mindx_elastic.platforms.strategy_file import load_strategy as load_strategy
    from mindx_elastic.platforms.strategy_file import merge_strategies as merge_strategies
    from mindx_elastic.platforms.strategy_file import save_strategy as save_strategy
    from mindx_elastic.start.facts import FileFact as FileFact
    from mindx_elastic.start.facts import KnownFaults as KnownFaults
    from mindx_elastic.start.facts import Refusal as Refusal
    from mindx_elastic.start.facts import ResumePlan as ResumePlan
    from mindx_elastic.start.facts import World as World
    from mindx_elastic.start.planner import plan_resume as plan_resume

_HOME = {
    "FileFact": "start.facts",
    "KnownFaults": "start.facts",
    "Layout": "core.layout",
    "Refusal": "start.facts",
    "ResumePlan": "start.facts",
    "Strategy": "core.strategy",
    "TensorSpec": "core.strategy",
    "World": "start.facts",
    "get_ckpt_path_with_strategy": "platforms.group_info",
    "load_strategy": "platforms.strategy_file",
    "merge_strategies": "platforms.strategy_file",
    "plan_resume": "start.planner",
    "restore_group_info_list": "platforms.group_info",
    "save_strategy": "platforms.strategy_file",
}
__all__ = [
    "FileFact",
    "KnownFaults",
    "Layout",
    "Refusal",
    "ResumePlan",
    "Strategy",
    "TensorSpec",
    "World",
    "get_ckpt_path_with_strategy",
    "load_strategy",
    "merge_strategies",
    "plan_resume",
    "restore_group_info_list",
    "save_strategy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mindx_elastic.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
