"""Every environment variable that the package reads, in frozen dataclasses.

Read once, when a `Guard` is entered; nothing is read at import. The table in ``docs/environment.md`` lists the same
names, values and defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindx_elastic.errors import UsageError

__all__ = ["DEFAULT_GRACE_S", "RankInfo", "Settings"]

DEFAULT_GRACE_S = 30.0  # Kubernetes' terminationGracePeriodSeconds and torchrun's own wait


def _number(env: Mapping[str, str], name: str, default: float, *, low: float, high: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"environment variable {name}={text!r} is not a number; unset it or give seconds") from None
    if not low <= value <= high:
        raise UsageError(f"environment variable {name}={text} is outside {low:g}..{high:g}")
    return value


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"environment variable {name}={text!r} is not a whole number") from None


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Who this process is in its job, as torchrun's environment tells it."""

    rank: int = 0
    """Global rank, from 0."""
    world_size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """Rank inside the node."""
    attempt: int = 0
    """How often the agent has restarted the workers (``TORCHELASTIC_RESTART_COUNT``)."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(f"RANK={self.rank} does not lie in 0..WORLD_SIZE-1 with WORLD_SIZE={self.world_size}")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RankInfo:
        env = os.environ if env is None else env
        return cls(
            rank=_integer(env, "RANK", 0),
            world_size=_integer(env, "WORLD_SIZE", 1),
            local_rank=_integer(env, "LOCAL_RANK", 0),
            attempt=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Behaviour that an operator may set from outside, without touching the script."""

    grace_s: float = DEFAULT_GRACE_S
    """``MINDX_GRACE_S``: seconds between an alarm and the moment the process must be gone."""
    agreement_s: float = 5.0
    """``MINDX_AGREEMENT_S``: longest wait for the other ranks' offers before every rank acts alone."""
    flag_poll_s: float = 0.2
    """``MINDX_FLAG_POLL_S``: how often the flag file is looked at (off the training thread)."""
    graceful_exit: bool | None = None
    """``MS_ENABLE_GRACEFUL_EXIT``: 1 watches the flag file, 0 never; unset: only where a file is named."""
    log_level: str = "INFO"
    """``MINDX_LOG_LEVEL``: level of the package's own logger."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if env is None else env
        flag = env.get("MS_ENABLE_GRACEFUL_EXIT", "").strip()
        if flag not in ("", "0", "1"):
            raise UsageError(f"environment variable MS_ENABLE_GRACEFUL_EXIT={flag!r}: give 1, 0 or nothing")
        level = env.get("MINDX_LOG_LEVEL", "").strip().upper() or "INFO"
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise UsageError(f"environment variable MINDX_LOG_LEVEL={level!r}: DEBUG, INFO, WARNING or ERROR")
        return cls(
            grace_s=_number(env, "MINDX_GRACE_S", DEFAULT_GRACE_S, low=0.5, high=86400),
            agreement_s=_number(env, "MINDX_AGREEMENT_S", 5.0, low=0.1, high=3600),
            flag_poll_s=_number(env, "MINDX_FLAG_POLL_S", 0.2, low=0.02, high=60),
            graceful_exit=None if flag == "" else flag == "1",
            log_level=level,
        )

    def with_grace(self, grace_s: float) -> Settings:
        """The same settings with another grace period, in seconds. Raises UsageError for anything but 0.5..86400."""
        if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0.5 <= grace_s <= 86400:
            raise UsageError(f"grace_s={grace_s!r}: give seconds from 0.5 to 86400")
        return replace(self, grace_s=float(grace_s))
