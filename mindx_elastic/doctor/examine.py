"""Everything `mindx-elastic doctor` looks at, in the order in which it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mindx_elastic.config import MemorySettings, SavingSettings, Settings, SharingSettings
from mindx_elastic.core.printable import printable
from mindx_elastic.doctor.container import look_at_container
from mindx_elastic.doctor.finding import Finding, problem
from mindx_elastic.doctor.machine import available_memory, memory_of_container
from mindx_elastic.doctor.places import look_at_directory, look_at_memory
from mindx_elastic.doctor.saving import HeldState
from mindx_elastic.doctor.state import read_directory
from mindx_elastic.doctor.variables import judge_variables
from mindx_elastic.errors import UsageError

__all__ = ["Examination", "examine"]

_Kind = TypeVar("_Kind", MemorySettings, SavingSettings, Settings, SharingSettings)


@dataclass(frozen=True, kw_only=True)
class Examination:
    grace_s: float
    state: HeldState | None
    """None: its size is not known."""
    findings: list[Finding]


def examine(
    directory: Path,
    env: Mapping[str, str],
    *,
    grace_s: float | None = None,
    state_bytes: int | None = None,
    ranks: int = 0,
) -> Examination:
    """Look at everything. Writes to the file system of `directory` for a second, and leaves nothing there.

    * `grace_s`: None: from the environment.
    * `state_bytes`: None: from the newest checkpoint in `directory`.
    * `ranks`: of this machine; 0: not told.

    Main thread; blocks on the disk. Raises nothing for what it finds.
    """
    grace_s = _settings(Settings, env).grace_s if grace_s is None else grace_s
    state, about_state = _state(directory, state_bytes, ranks)
    findings = [
        *look_at_directory(
            directory,
            state,
            grace_s,
            allow_shared=_settings(SharingSettings, env).allow_shared,
            page_cache=_settings(SavingSettings, env).page_cache,
        ),
        *about_state,
        *look_at_memory(_settings(MemorySettings, env).base, state, available_memory(memory_of_container())),
        *look_at_container(env, grace_s),
        *judge_variables(env),
    ]
    return Examination(grace_s=grace_s, state=state, findings=list(dict.fromkeys(findings)))


def _settings(kind: type[_Kind], env: Mapping[str, str]) -> _Kind:
    """Those of the environment; the defaults where a value cannot be used, which `judge_variables` tells."""
    try:
        return kind.from_env(env)
    except UsageError:
        return kind.from_env({})


def _state(directory: Path, state_bytes: int | None, ranks: int) -> tuple[HeldState | None, list[Finding]]:
    state: HeldState | None = None
    findings: list[Finding] = []
    if directory.is_dir():
        try:
            state, findings = read_directory(directory, ranks)
        except OSError as error:
            text = f"{printable(directory)} cannot be read: {error.strerror or error}"
            findings = [problem("directory", text, "run as the user who trains, or give another directory")]
        except UsageError as error:
            findings = [problem("variables", printable(error), "docs/reference.md says what it may be")]
    if state_bytes is not None:
        replicated = state is None or state.is_replicated
        ranks = ranks or (state.ranks if state is not None else 1)
        state = HeldState(nbytes=state_bytes, ranks=ranks, is_replicated=replicated)
    return state, findings
