"""What stops a job from outside: fault reports of the platform, a flag file that a person sets, a notice that
this machine is about to be taken away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindx_elastic.config import FaultPaths, Settings
from mindx_elastic.platforms.fault_watch import FaultEvent, FaultWatch
from mindx_elastic.platforms.flag_file import FlagFile
from mindx_elastic.platforms.notices import NoticeWatch

__all__ = ["FLAG_NAME", "StopFiles"]

FLAG_NAME = "graceful_exit.json"


class StopFiles:
    """Used by one thread. Neither method raises for what a file holds."""

    def __init__(self, run_dir: Path, paths: FaultPaths, settings: Settings, notice: str = "") -> None:
        """Looks for ``graceful_exit.json`` in `run_dir`; in the working directory too where `Settings.graceful_exit` is
        on; nowhere where it is off. notice: of ``--notice``; empty: none was asked for."""
        self._notice = NoticeWatch(notice) if notice else None
        self.faults = FaultWatch(paths)
        folders: Sequence[Path] = [run_dir, Path.cwd()] if settings.graceful_exit else [run_dir]
        wanted = [] if settings.graceful_exit is False else [folder / FLAG_NAME for folder in folders]
        self._flags = [FlagFile(path) for path in dict.fromkeys(wanted)]

    def poll(self) -> FaultEvent | None:
        """What has happened since the last call; one event at a time."""
        for flag in self._flags:
            if flag.poll():
                return FaultEvent("request", f"flag file {flag.path}", frozenset(), flag.path)
        return self.faults.poll() or self.notice()

    def notice(self) -> FaultEvent | None:
        """That this machine is about to be taken away; the same at each call."""
        found = None if self._notice is None else self._notice.poll()
        return None if found is None else FaultEvent("request", found.reason, frozenset(), "--notice", found.grace_s)

    def flushing(self) -> bool:
        """Whether the platform forbids a start at this moment."""
        return self.faults.flushing()
