"""Which policies this rank has: those of its own callbacks, and those that only another rank was given.

Scripts often add checkpoint callbacks ``if rank == 0:``. With one file a rank that would leave every step
incomplete, so a rank that lacks a kind of checkpoint callback makes one like that of the lowest rank that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Merged
from mindx_elastic.agreement.validation import making_sense
from mindx_elastic.core.events import logger
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy
from mindx_elastic.train.callbacks import Callback
from mindx_elastic.train.checkpoint import CheckpointConfig, ExceptionCheckpoint, ModelCheckpoint, SavingCallback
from mindx_elastic.train.request_exit import OnRequestExit
from mindx_elastic.train.tft import TFTRegister

__all__ = ["Policies", "adopt", "gather_policies"]

_KINDS: tuple[type[SavingCallback], ...] = (ExceptionCheckpoint, ModelCheckpoint, OnRequestExit, TFTRegister)


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


def adopt(callbacks: Sequence[Callback], exchange: Exchange, rank: int) -> list[SavingCallback]:
    """Callbacks that this rank must add, because only other ranks were given them. Main thread, all ranks together.

    Raises UsageError on every rank when the ranks were given different schedules, which would save different steps.
    """
    mine = [{"kind": kind.__name__, "spec": c.spec()} for kind in _KINDS for c in callbacks if isinstance(c, kind)]
    answer = exchange.gather("policies", mine, _merge)
    with making_sense("the callbacks of the ranks"):
        found = {str(name): (str(holders), first, specs) for name, holders, first, specs in answer.common}
        lacking = {str(name) for name in answer.own}
        added = [_build(k, spec) for k in _KINDS if k.__name__ in lacking for spec in found[k.__name__][2]]
    for name, (holders, first, _) in found.items():
        if rank == first:
            logger.warning(
                "%s was given to %s only; the other ranks save in the same way. Weaker than giving it to "
                "every rank: append_info and the callback's own state come from rank %d, and its directory "
                "must be reachable under the same path on every node",
                name,
                holders,
                rank,
            )
    return added


def _merge(said: Sequence[list[dict[str, Any]]]) -> Merged:
    """Of each kind that only some ranks have: which ranks, the first one, what it has. And what each rank lacks."""
    _check_schedules(said)
    common: list[list[Any]] = []
    lacking: list[list[str]] = [[] for _ in said]
    for kind in _KINDS:
        holders = [rank for rank, found in enumerate(said) if _specs(found, kind)]
        if holders and len(holders) < len(said):
            common.append([kind.__name__, rank_list(holders), holders[0], _specs(said[holders[0]], kind)])
            for rank in set(range(len(said))) - set(holders):
                lacking[rank].append(kind.__name__)
    return Merged(common, lacking)


def _specs(found: list[dict[str, Any]], kind: type[SavingCallback]) -> list[dict[str, Any]]:
    return [item["spec"] for item in found if item["kind"] == kind.__name__]


def _build(kind: type[SavingCallback], spec: dict[str, Any]) -> SavingCallback:
    arguments = dict(spec)
    if "config" in arguments:
        arguments["config"] = CheckpointConfig(**arguments["config"])
    return kind(**arguments)


def _check_schedules(everybody: Sequence[list[dict[str, Any]]]) -> None:
    names = ("save_checkpoint_steps", "save_checkpoint_seconds")
    first: tuple[int, list[list[object]]] | None = None
    for rank, found in enumerate(everybody):
        schedule = [[spec["config"][name] for name in names] for spec in _specs(found, ModelCheckpoint)]
        if not schedule:
            continue
        if first is None:
            first = (rank, schedule)
        elif schedule != first[1]:
            raise UsageError(
                f"the ranks have different ModelCheckpoint schedules ({', '.join(names)}): rank {first[0]} {first[1]}, "
                f"rank {rank} {schedule}. A step counts only when every rank has saved it; give all ranks the same"
            )
