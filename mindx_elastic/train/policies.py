"""Which policies the callbacks of this rank have, and whether those of the other ranks are alike.

Scripts often add checkpoint callbacks ``if rank == 0:``. With one file a rank that would leave every step incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Merged
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy
from mindx_elastic.train.callbacks import Callback
from mindx_elastic.train.checkpoint import ExceptionCheckpoint, ModelCheckpoint
from mindx_elastic.train.request_exit import OnRequestExit
from mindx_elastic.train.tft import TFTRegister

__all__ = ["Policies", "check_alike", "gather_policies"]

_KINDS = (ExceptionCheckpoint, ModelCheckpoint, OnRequestExit, TFTRegister)


@dataclass
class Policies:
    """The policies of all callbacks: what they want of the guard."""

    exits: list[ExitPolicy] = field(default_factory=list)
    periodic: list[PeriodicPolicy] = field(default_factory=list)

    @property
    def directory(self) -> Path | None:
        """Folder of the run (events): that of the first policy. None: no callback has a policy."""
        found = [p.directory for p in self.exits] + [p.directory for p in self.periodic]
        return found[0] if found else None


def gather_policies(callbacks: Sequence[Callback]) -> Policies:
    """Collect the policies in the order of the callbacks; a breakpoint file that two of them want is written once.

    Raises UsageError when two periodic policies would write the same files.
    """
    policies = Policies()
    breakpoints: dict[tuple[Path, object], ExitPolicy] = {}
    for callback in sorted(callbacks, key=lambda c: isinstance(c, ModelCheckpoint)):  # stable; wider alarms first
        for exit_policy in callback.exit_policies():
            key = (exit_policy.directory, getattr(callback, "prefix", None) or id(exit_policy))
            if exit_policy.kind != "breakpoint" or key not in breakpoints:
                breakpoints[key] = exit_policy
                policies.exits.append(exit_policy)
        policies.periodic.extend(callback.periodic_policies())
    seen: set[tuple[Path, str]] = set()
    for policy in policies.periodic:
        prefix = getattr(policy, "prefix", None)
        if isinstance(prefix, str):
            if (policy.directory, prefix) in seen:
                raise UsageError(
                    f"two ModelCheckpoint callbacks write {prefix!r} files into {policy.directory}; give "
                    "them different prefixes or directories"
                )
            seen.add((policy.directory, prefix))
    return policies


def check_alike(callbacks: Sequence[Callback], exchange: Exchange) -> None:
    """Raise UsageError on every rank where the ranks were not given the same callbacks that save.

    Main thread, all ranks together.
    """
    exchange.gather("policies", sorted(_in_words(each) for each in callbacks if isinstance(each, _KINDS)), _compare)


def _in_words(callback: Callback) -> str:
    words = type(callback).__name__
    if isinstance(callback, ModelCheckpoint):
        names = ("save_checkpoint_steps", "save_checkpoint_seconds")
        words += f"({', '.join(f'{name}={getattr(callback.config, name)}' for name in names)})"
    return words


def _compare(said: Sequence[list[str]]) -> Merged:
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            one, other = (", ".join(each) or "none" for each in (said[0], theirs))
            raise UsageError(
                f"the ranks have different callbacks that save: rank 0 {one}; rank {rank} {other}. A step counts only "
                "when every rank has saved it: give all ranks the same, without `if rank == 0:`"
            )
    return Merged(None)
