"""Everything `mindx-elastic doctor` looks at, in the order in which it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.config import DEFAULT_GRACE_S, MemorySettings, SavingSettings, Settings, SharingSettings
from mindx_elastic.core.printable import printable
from mindx_elastic.doctor.container import look_at_container
from mindx_elastic.doctor.finding import Finding, problem
from mindx_elastic.doctor.machine import available_memory, look_at_open_files, memory_of_container
from mindx_elastic.doctor.places import look_at_directory, look_at_memory
from mindx_elastic.doctor.saving import HeldState
from mindx_elastic.doctor.software import look_at_software
from mindx_elastic.doctor.state import read_directory
from mindx_elastic.doctor.variables import judge_variables
from mindx_elastic.errors import UsageError

__all__ = ["Examination", "ExamineOptions", "examine"]


@dataclass(frozen=True, kw_only=True)
class ExamineOptions:
    """What the command was told."""

    directory: Path
    grace_s: float | None = None
    """None: from the environment."""
    state_bytes: int | None = None
    """None: from the newest checkpoint in `directory`."""
    ranks: int = 0
    """Ranks of this machine; 0: not told."""
    measure_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Examination:
    grace_s: float
    state: HeldState | None
    """None: its size is not known."""
    findings: list[Finding]


def examine(wish: ExamineOptions, env: Mapping[str, str]) -> Examination:
    """Look at everything. Writes to the file system of `wish.directory` for a moment, and leaves nothing there.

    Main thread; blocks on the disk. Raises nothing for what it finds.
    """
    grace_s, memory, sharing, saving = _settings(env)
    grace_s = grace_s if wish.grace_s is None else wish.grace_s
    state, about_state = _state(wish)
    findings = [
        *look_at_directory(
            wish.directory,
            state,
            grace_s,
            wish.measure_s,
            allow_shared=sharing is None or sharing.allow_shared,
            page_cache=saving.page_cache,
        ),
        *about_state,
    ]
    if memory is not None:  # else `judge_variables` tells which variable is wrong
        findings += look_at_memory(memory.base, state, available_memory(memory_of_container()))
    findings.append(look_at_open_files())
    findings += look_at_software()
    findings += look_at_container(env, grace_s)
    findings += judge_variables(env)
    return Examination(grace_s=grace_s, state=state, findings=list(dict.fromkeys(findings)))


def _settings(
    env: Mapping[str, str],
) -> tuple[float, MemorySettings | None, SharingSettings | None, SavingSettings]:
    """Grace period, shared memory, shared directories, saves; the default or None where a value cannot be used."""
    grace_s, memory, sharing, saving = DEFAULT_GRACE_S, None, None, SavingSettings()
    with suppress(UsageError):
        saving = SavingSettings.from_env(env)
    try:
        grace_s = Settings.from_env(env).grace_s
        memory = MemorySettings.from_env(env)
        sharing = SharingSettings.from_env(env)
    except UsageError:
        pass  # told by `judge_variables`
    return grace_s, memory, sharing, saving


def _state(wish: ExamineOptions) -> tuple[HeldState | None, list[Finding]]:
    state: HeldState | None = None
    findings: list[Finding] = []
    if wish.directory.is_dir():
        try:
            state, findings = read_directory(wish.directory, wish.ranks)
        except OSError as error:
            text = f"{printable(wish.directory)} cannot be read: {error.strerror or error}"
            findings = [problem("directory", text, "run as the user who trains, or give another directory")]
        except UsageError as error:
            findings = [problem("variables", printable(error), "docs/reference.md says what it may be")]
    if wish.state_bytes is not None:
        replicated = state is None or state.is_replicated
        ranks = wish.ranks or (state.ranks if state is not None else 1)
        state = HeldState(nbytes=wish.state_bytes, ranks=ranks, is_replicated=replicated)
    return state, findings
