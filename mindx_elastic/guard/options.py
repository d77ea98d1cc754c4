"""What a program asks of its `Guard`: the arguments, checked and never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.config import Settings, SharingSettings, parse_rehearse
from mindx_elastic.core.layout import Layout
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.periodic import PeriodicSave, parse_save_every
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy, breakpoint_policy, check_policies
from mindx_elastic.guard.unmanaged import MODES

__all__ = ["DEFAULT_SIGNALS", "GuardOptions"]

DEFAULT_SIGNALS = STOP_SIGNALS


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """The arguments of `Guard` but for the training state itself; `Guard` says more of each. Raises UsageError."""

    directory: str | Path
    """Folder for checkpoints."""
    prefix: str = "ckpt"
    """First part of the checkpoints' names."""
    resume: str | Path = "auto"
    """``auto``, ``never``, or the path to resume from."""
    grace_s: float | None = None
    """Seconds from an alarm until the process must be gone; None: as the environment says."""
    final_save: bool | None = None
    """Whether to save the last boundary of a training that ends by itself; None: as the environment says."""
    save_on_exception: bool = True
    """Whether an exception that leaves the block saves the last boundary; without effect beside `policies`."""
    signals: Sequence[int] = DEFAULT_SIGNALS
    """Signal numbers that stop the job; without effect beside `policies`, as are the next two."""
    flag_file: str | Path | None = None
    """JSON file that stops the job once it holds ``{"GracefulExit": 1}``."""
    append_info: Sequence[object] = ()
    """JSON-able values for the files' headers."""
    policies: Sequence[ExitPolicy] | None = None
    """What to save at a stop; None: one breakpoint, made from the arguments above."""
    periodic: Sequence[PeriodicPolicy] = ()
    """What to save now and then."""
    save_every: int | str | None = None
    """A further policy of that kind: steps, a time such as ``10min``, or ``auto``."""
    allow_shared_directory: bool = False
    """Whether to accept a directory that every user may write to."""
    trusted_users: Sequence[int | str] = ()
    """Further users, by number or name, whose files count."""
    snapshot_every: int | str | None = None
    """Steps between snapshots in shared memory, 0, or ``auto``; None: as the environment says."""
    redundancy: int | None = None
    """On how many nodes to keep each file; None: as the environment says."""
    remove_redundancy: bool = False
    """Whether ranks that hold the same write each part of it once, but at a stop; without effect beside `policies`."""
    unmanaged: str | None = None
    """``error`` or ``warn``: state that is certain not to be kept; None: as the environment says."""
    overlap: bool | None = None
    """Whether a stop makes one step more, to compare the next start with; None: as the environment says."""
    on_difference: str = "warn"
    """``warn`` or ``stop``: where the resumed run makes another step than the stopped one."""
    rehearse: int | str | Sequence[int | str] | None = None
    """Steps, or ``epoch`` (the first one of the second epoch), where the job tries its resume; None: as the environment
    says."""
    layouts: Mapping[str, Layout] | None = None
    """Layouts of parameters that no DTensor describes, by name pattern."""

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, Path)) or not str(self.directory):
            raise UsageError(f"directory={self.directory!r}: give the path of the folder for checkpoints")
        for name in ("final_save", "overlap"):
            if not isinstance(value := getattr(self, name), (bool, type(None))):
                raise UsageError(f"{name}={value!r}: give True, False or None")
        if not isinstance(self.remove_redundancy, bool):
            raise UsageError(f"remove_redundancy={self.remove_redundancy!r}: give True or False")
        if self.unmanaged not in (None, *MODES):
            raise UsageError(f'unmanaged={self.unmanaged!r}: give "error", "warn" or None')
        if self.on_difference not in ("warn", "stop"):
            raise UsageError(f'on_difference={self.on_difference!r}: give "warn" or "stop"')
        parse_rehearse(self.rehearse, "rehearse")
        check_policies([*self.exit_policies(), *self.periodic_policies()])

    @property
    def folder(self) -> Path:
        """`directory`, as a path."""
        return Path(self.directory)

    def exit_policies(self) -> tuple[ExitPolicy, ...]:
        """`policies`, or the default one."""
        if self.policies is not None:
            return tuple(self.policies)
        return (
            breakpoint_policy(
                self.prefix,
                self.folder,
                self.signals,
                self.flag_file,
                self.append_info,
                exceptions=self.save_on_exception,
                remove_redundancy=self.remove_redundancy,
            ),
        )

    def periodic_policies(self) -> tuple[PeriodicPolicy, ...]:
        """`periodic`, and the policy that `save_every` asks for."""
        every = parse_save_every(self.save_every)
        if every is None:
            return tuple(self.periodic)
        own = PeriodicSave(
            self.prefix,
            self.folder,
            every,
            append_info=tuple(self.append_info),
            remove_redundancy=self.remove_redundancy,
        )
        return (*self.periodic, own)

    def settings(self) -> Settings:
        """The environment's settings, where these options do not say otherwise. Raises UsageError."""
        given: dict[str, Any] = {"final_save": self.final_save, "overlap": self.overlap, "unmanaged": self.unmanaged}
        if self.rehearse is not None:
            given["rehearse"] = parse_rehearse(self.rehearse, "rehearse")
        settings = replace(Settings.from_env(), **{name: value for name, value in given.items() if value is not None})
        return settings if self.grace_s is None else settings.with_grace(self.grace_s)

    def sharing(self) -> SharingSettings:
        """Which directories and whose files to accept: what the environment and these options allow."""
        return SharingSettings.from_env().with_arguments(self.allow_shared_directory, self.trusted_users)
