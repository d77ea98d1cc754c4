"""What a program asks of its `Guard`: the arguments, checked and never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindx_elastic.alarm.alarm import ALARM_KINDS
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
    """The arguments of `Guard` but for the training state itself; `Guard` says once what each means. None, unless it
    says otherwise: as the environment has it. Raises UsageError."""

    directory: str | Path
    prefix: str = "ckpt"
    resume: str | Path = "auto"
    grace_s: float | None = None
    final_save: bool | None = None
    save_on_exception: bool = True
    signals: Sequence[int] = DEFAULT_SIGNALS
    flag_file: str | Path | None = None
    append_info: Sequence[object] = ()
    policies: Sequence[ExitPolicy] | None = None
    periodic: Sequence[PeriodicPolicy] = ()
    save_every: int | str | None = None
    allow_shared_directory: bool = False
    trusted_users: Sequence[int | str] = ()
    snapshot_every: int | str | None = None
    redundancy: int | None = None
    archive: str | None = None
    remove_redundancy: bool = False
    unmanaged: str | None = None
    overlap: bool | None = None
    on_difference: str = "warn"
    rehearse: int | str | Sequence[int | str] | None = None
    layouts: Mapping[str, Layout] | None = None
    odd: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, Path)) or not str(self.directory):
            raise UsageError(f"directory={self.directory!r}: give the path of the folder for checkpoints")
        for name in ("final_save", "overlap"):
            if not isinstance(value := getattr(self, name), (bool, type(None))):
                raise UsageError(f"{name}={value!r}: give True, False or None")
        if not isinstance(self.archive, (str, type(None))):
            raise UsageError(f"archive={self.archive!r}: give a URL (s3://bucket/folder), or None")
        if not isinstance(self.remove_redundancy, bool):
            raise UsageError(f"remove_redundancy={self.remove_redundancy!r}: give True or False")
        if self.unmanaged not in (None, *MODES):
            raise UsageError(f'unmanaged={self.unmanaged!r}: give "error", "warn" or None')
        if self.on_difference not in ("warn", "stop"):
            raise UsageError(f'on_difference={self.on_difference!r}: give "warn" or "stop"')
        if self.odd not in (None, "ignore", "back", "stop"):
            raise UsageError(f'odd={self.odd!r}: give "back", "stop", "ignore" or None')
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
        own = breakpoint_policy(
            self.prefix,
            self.folder,
            ALARM_KINDS if self.save_on_exception else ALARM_KINDS - {"exception"},
            self.signals,
            flag_file=None if self.flag_file is None else Path(self.flag_file),
            append_info=tuple(self.append_info),
            remove_redundancy=self.remove_redundancy,
        )
        return (own,)

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
        given["odd"] = self.odd
        if self.rehearse is not None:
            given["rehearse"] = parse_rehearse(self.rehearse, "rehearse")
        settings = replace(Settings.from_env(), **{name: value for name, value in given.items() if value is not None})
        return settings if self.grace_s is None else settings.with_grace(self.grace_s)

    def sharing(self) -> SharingSettings:
        """Which directories and whose files to accept: what the environment and these options allow."""
        return SharingSettings.from_env().with_arguments(self.allow_shared_directory, self.trusted_users)
