"""Works out what each rank of a new start reads, from the files that are there and the devices that have failed.

The names below are for separate programs; a job that uses `Guard` needs none but `Layout`.
"""

from __future__ import annotations

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.platforms.group_info import get_ckpt_path_with_strategy, restore_group_info_list
from mindx_elastic.platforms.strategy_file import load_strategy, merge_strategies, save_strategy
from mindx_elastic.start.facts import FileFact, KnownFaults, Refusal, ResumePlan, World
from mindx_elastic.start.planner import plan_resume

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
