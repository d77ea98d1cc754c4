"""Variables of the environment that nothing reads, or that contradict each other. A start refuses wrong values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from mindx_elastic import config
from mindx_elastic.core.printable import printable
from mindx_elastic.doctor.saving import Finding, Level

__all__ = ["judge_variables", "known_names"]

_OTHER_NAMES = {
    *("MINDX_RESUME_RUN_ID", "MINDX_RESUME_ATTEMPT", "MINDX_RESUME_STEP"),  # for shell scripts
    *("MINDX_WHEEL_DIR", "MINDX_INSTALL_DIR"),  # of ma_pre_start.sh
    "MINDX_CLUSTER_ANEW",  # of the dynamic cluster, for itself
    "MINDX_DEBUG",  # of the commands: tracebacks
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
}
_ALIKE = 0.8


class _Asked(dict[str, str]):
    """An environment that notes what is asked for."""

    def __init__(self, content: Mapping[str, str]) -> None:
        super().__init__(content)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)


def known_names() -> set[str]:
    """The names of all variables that the package reads."""
    found = set(_OTHER_NAMES)
    for settings in vars(config).values():
        if hasattr(settings, "from_env"):
            asked = _Asked({})
            settings.from_env(asked)
            found |= asked.names
    return found


def judge_variables(env: Mapping[str, str]) -> list[Finding]:
    """What a start does not refuse: names that nothing reads, and times that contradict each other."""
    return [*_unknown(env), *_grace(env)]


def _unknown(env: Mapping[str, str]) -> Iterator[Finding]:
    """MindSpore and torch have more names than we know, so theirs must be like one of ours."""
    known = known_names()
    for name in sorted(env):
        if name in known or not name.startswith(("MINDX", "MS_", "TORCH_ELASTIC", "TORCHELASTIC")):
            continue
        alike = difflib.get_close_matches(name, known, 1, _ALIKE)
        if not alike and not name.startswith("MINDX_"):
            continue
        remedy = f"{alike[0]}?" if alike else "unset it; docs/reference.md has them all"
        yield Finding("variables", Level.WARNING, f"{printable(name)} is read by nothing", remedy)


def _grace(env: Mapping[str, str]) -> Iterator[Finding]:
    """Times that contradict each other."""
    ours, theirs = _seconds(env, "MINDX_GRACE_S"), _seconds(env, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if ours is not None and theirs is not None and theirs < ours:
        yield Finding(
            "variables",
            Level.PROBLEM,
            f"MINDX_GRACE_S={ours:g}, but torchrun kills after {theirs:g} s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
            f"make them equal; or under mindx-elastic run, --grace {ours:g}, which goes before both",
        )


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    """None: not set, or no number, which a start refuses."""
    try:
        return float(env.get(name, ""))
    except ValueError:
        return None
