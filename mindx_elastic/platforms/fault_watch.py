"""Faults that the platform reports through files: the fault ConfigMap and ``reset.json``.

A report that is already there at the start names the devices that the platform has replaced before it started us; to
stop the new run because of it would stop every run. So only a *change* after the start counts, or a report whose own
time stamp or file is younger than this process. The file of a mount may be written again because another key of the
ConfigMap has changed: contents are compared, not file times.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.config import FaultPaths
from mindx_elastic.core.events import logger
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.platforms.files import (
    parse_json_object,
    read_mounted,
    time_stamp,
    whole_number,
)
from mindx_elastic.platforms.flag_file import process_started_at

__all__ = [
    "FaultEvent",
    "FaultReport",
    "FaultWatch",
    "ResetInfo",
    "parse_fault_report",
    "parse_reset_info",
    "watch_fault_info",
]

_FAULT_KEY, _CHECK_KEY, _RESET_FILE = "fault-npus", "checkCode", "reset.json"
_RANK_KEYS = ("FaultRankIds", "FaultRank")
_TIME_KEYS = ("CreatTime", "CreateTime", "UpdateTime")
_RESET_KEYS = ("RankList", "UpdateTime", "RetryTime", "FaultFlushing", "GracefulExit", "RestartFaultProcess")
_HARMLESS_POLICIES = ("", "empty", "ignore")


@dataclass(frozen=True)
class FaultReport:
    """One readable state of ``fault-npus``."""

    ranks: frozenset[int]
    """Ranks whose devices are faulty; empty: none, or nothing is known yet."""
    created: float | None
    """The report's own time stamp, unix seconds."""
    source: Path
    text: str
    """The JSON text as it was read."""
    initializing: bool = False
    """The platform does not know yet: neither a fault nor the end of one."""
    problems: tuple[str, ...] = ()
    """What in it was not understood and left out."""


@dataclass(frozen=True)
class ResetInfo:
    """One readable state of ``reset.json``."""

    graceful_exit: bool = False
    faulty: frozenset[int] = frozenset()
    """Ranks that are unrecovered, with a policy that asks for more than to ignore it."""
    flushing: bool = False
    """The platform still clears the devices: nothing may be started yet."""
    updated: float | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class FaultEvent:
    """The platform wants the job to stop."""

    kind: Literal["fault", "request"]
    """The alarm's kind: ``fault`` for named ranks, ``request`` for ``"GracefulExit": 1``."""
    reason: str
    """One line for a person."""
    ranks: frozenset[int]
    """The ranks named; empty for a request."""
    source: Path


class FaultWatch:
    """Watches the platform's files. `poll` and `flushing` are used by one thread. Neither raises for what a file holds.

    * `world_size`: ranks from here on are named in a warning and left out; None: unknown. May be set at any time.
    * `started_at`: unix seconds; None: the start of this process.

    A defect (half-written, too large, unknown keys, a check code that does not fit) is one warning; the file is read
    again at the next poll.
    """

    def __init__(self, paths: FaultPaths, *, world_size: int | None = None, started_at: float | None = None) -> None:
        self.paths = paths
        self.world_size = world_size
        self._started_at = process_started_at() if started_at is None else started_at
        self._report: FaultReport | None = None
        self._reset: ResetInfo | None = None
        self._flushing = False
        self._handled: dict[Path, tuple[object, ...]] = {}  # what has been judged already, good or bad
        self._warned: dict[Path, str] = {}

    def poll(self) -> FaultEvent | None:
        """What has happened since the last call; one event at a time."""
        return self._poll_report() or self._poll_reset()

    def flushing(self) -> bool:
        """Whether the platform forbids a start at this moment (``"FaultFlushing": true``). While the file cannot be
        read the last state that could be counts."""
        path = self.paths.reset_dir / _RESET_FILE
        try:
            (found,) = read_mounted(self.paths.reset_dir, _RESET_FILE)
            self._flushing = found is not None and parse_reset_info(found[0]).flushing
        except (OSError, ValueError) as error:
            self._warn(path, error)
        return self._flushing

    # --- the fault ConfigMap ------------------------------------------------------------------------------------------

    def _poll_report(self) -> FaultEvent | None:
        path = self.paths.fault_dir / _FAULT_KEY
        try:
            found, check = read_mounted(self.paths.fault_dir, _FAULT_KEY, _CHECK_KEY)
            if found is None:
                # No report is a state too, but only at the start: some writers delete the file before they write it.
                self._report = self._report or FaultReport(frozenset(), None, path, "")
                return None
            (text, written), code = found, "" if check is None else check[0].strip().strip('"').lower()
            if self._is_handled(path, text, code):
                return None
            if code and code not in {hashlib.sha256(t.encode()).hexdigest() for t in (text, text.strip())}:
                raise ValueError(f"does not fit its {_CHECK_KEY} (half-written?)")
            report = parse_fault_report(text, path, world_size=self.world_size)
        except (OSError, ValueError) as error:
            self._warn(path, error)
            return None
        self._warn_of_parts(path, report.problems)
        return None if report.initializing else self._judge_report(report, written)

    def _judge_report(self, report: FaultReport, written: float) -> FaultEvent | None:
        known, self._report = self._report, report
        shown = rank_list(report.ranks)
        if known is None:
            if not report.ranks:
                return None
            if not self._is_fresh(report.created, written):
                logger.info("%s names %s since before this start: done, until it changes", report.source, shown)
                return None
        elif not _has_news(known, report):
            return None
        return FaultEvent("fault", f"fault report {report.source}: {shown}", report.ranks, report.source)

    # --- reset.json ---------------------------------------------------------------------------------------------------

    def _poll_reset(self) -> FaultEvent | None:
        path = self.paths.reset_dir / _RESET_FILE
        try:
            (found,) = read_mounted(self.paths.reset_dir, _RESET_FILE)
            if found is None:
                self._reset = self._reset or ResetInfo()
                return None
            text, written = found
            if self._is_handled(path, text):
                return None
            state = parse_reset_info(text, world_size=self.world_size)
        except (OSError, ValueError) as error:
            self._warn(path, error)
            return None
        self._warn_of_parts(path, state.problems)
        known, self._reset, self._flushing = self._reset, state, state.flushing
        if known is None:
            if not self._is_fresh(state.updated, written):
                if state.graceful_exit or state.faulty:
                    logger.info("what %s asks for is from before this start: done, until it changes", path)
                return None
            known = ResetInfo()
        if state.faulty - known.faulty:
            return FaultEvent("fault", f"{path}: {rank_list(state.faulty)} not recovered", state.faulty, path)
        if state.graceful_exit and not known.graceful_exit:
            return FaultEvent("request", f'"GracefulExit": 1 in {path}', frozenset(), path)
        return None

    # --- small parts --------------------------------------------------------------------------------------------------

    def _is_handled(self, path: Path, *content: str) -> bool:
        """Whether the same content has been judged before: parsing 1 MiB of nonsense five times a second would cost."""
        key = (*content, self.world_size)
        if self._handled.get(path) == key:
            return True
        self._handled[path] = key
        return False

    def _is_fresh(self, stamped: float | None, written: float) -> bool:
        return written >= self._started_at or (stamped is not None and stamped > self._started_at)

    def _warn_of_parts(self, path: Path, problems: tuple[str, ...]) -> None:
        if not problems:
            self._warned.pop(path, None)
            return
        text = "; ".join(problems)
        if self._warned.get(path) != text:
            self._warned[path] = text
            logger.warning("%s %s; the rest of it counts", path, text)

    def _warn(self, path: Path, error: Exception) -> None:
        text = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        if self._warned.get(path) != text:
            self._warned[path] = text
            logger.warning("%s %s; it will be read again", path, text)


def watch_fault_info(
    watcher: Watcher, watch: FaultWatch, period_s: float, on_fault: Callable[[FaultEvent], None]
) -> None:
    """Look at `watch` every `period_s` seconds in the watcher thread and call ``on_fault(event)`` there."""

    def look() -> None:
        try:
            event = watch.poll()
            if event is not None:
                on_fault(event)
        finally:
            watcher.call_at(time.monotonic() + period_s, look)

    watcher.post(look)


def parse_fault_report(text: str, source: Path, *, world_size: int | None = None) -> FaultReport:
    """``{"FaultRankIds": ["1"], "CreatTime": 1690000000}`` (the missing e is real), ``{"FaultRank": [1], "UpdateTime":
    ...}`` or ``{"status": "initializing"}``. The first schedulers wrote the list as text: ``"[\\"1\\"]"``.

    Raises ValueError, with what is wrong, for anything else."""
    content = parse_json_object(text)
    known = [key for key in _RANK_KEYS if key in content]
    if not known:
        if content.get("status") == "initializing":
            return FaultReport(frozenset(), None, source, text, initializing=True)
        raise ValueError(f"has none of the keys {', '.join(_RANK_KEYS)} and status{_did_you_mean(content, _RANK_KEYS)}")
    ranks: set[int] = set()
    problems: list[str] = []
    for key in known:
        ranks |= _rank_list(key, _list_in_text(content[key]), world_size, problems)
    created = max((t for key in _TIME_KEYS if (t := time_stamp(content.get(key))) is not None), default=None)
    return FaultReport(frozenset(ranks), created, source, text, problems=tuple(problems))


def parse_reset_info(text: str, *, world_size: int | None = None) -> ResetInfo:
    """Missing keys have their harmless value.

    Raises ValueError for no JSON object, or for one without any of the known keys.
    """
    content = parse_json_object(text)
    if content and not any(key in content for key in _RESET_KEYS):
        raise ValueError(f"has none of the keys {', '.join(_RESET_KEYS)}{_did_you_mean(content, _RESET_KEYS)}")
    problems: list[str] = []
    entries = content.get("RankList") or []
    if not isinstance(entries, list):
        raise ValueError(f"has a RankList that is no list but {entries!r:.60}")
    faulty = [entry.get("RankId") if isinstance(entry, dict) else entry for entry in entries if _asks_for_stop(entry)]
    return ResetInfo(
        graceful_exit=_switch("GracefulExit", content, problems),
        faulty=frozenset(_rank_list("RankList", faulty, world_size, problems)),
        flushing=_switch("FaultFlushing", content, problems),
        updated=time_stamp(content.get("UpdateTime")),
        problems=tuple(problems),
    )


def _asks_for_stop(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return True  # not understood; named as a problem where the ranks are read
    if entry.get("Status") != "unrecovered":
        return False
    policy = entry.get("Policy", entry.get("InitialPolicy", ""))
    return not (isinstance(policy, str) and policy.strip().lower() in _HARMLESS_POLICIES)


def _list_in_text(value: Any) -> Any:
    """The list (or null) that a text holds as JSON; anything else as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "n"):
        return value
    try:
        inner = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return inner if inner is None or isinstance(inner, list) else value


def _rank_list(key: str, value: Any, world_size: int | None, problems: list[str]) -> set[int]:
    if not isinstance(value, list):
        if value is None:
            return set()
        raise ValueError(f"has a {key} that is no list but {value!r:.60}")
    ranks = set()
    for item in value:
        rank = whole_number(item)
        if rank is None:
            problems.append(f"names {item!r:.60} in {key}, which is no rank")
        elif world_size is not None and rank >= world_size:
            problems.append(f"names rank {rank} in {key}, but the job has ranks 0..{world_size - 1}")
        else:
            ranks.add(rank)
    del problems[8:]  # a line for a person
    return ranks


def _switch(key: str, content: dict[str, Any], problems: list[str]) -> bool:
    value = content.get(key, False)
    if isinstance(value, str):
        value = {"true": True, "1": True, "false": False, "0": False, "": False}.get(value.strip().lower(), value)
    if value is None or (isinstance(value, (bool, int)) and value in (0, 1)):
        return bool(value)
    problems.append(f'has "{key}": {value!r:.60}, expected true or false')
    return False


def _has_news(known: FaultReport, report: FaultReport) -> bool:
    """Whether `report` tells of a fault that `known` did not. A rank that is gone from the list is none."""
    if report.ranks - known.ranks:
        return True
    younger = report.created is not None and report.created > (known.created or 0.0)
    return bool(report.ranks) and report.ranks == known.ranks and younger


def _did_you_mean(content: dict[str, Any], keys: tuple[str, ...]) -> str:
    for name in list(content)[:20]:
        near = difflib.get_close_matches(name[:60], keys, 1)
        if near:
            return f"; is {name[:60]!r} meant to be {near[0]}?"
    return ""
