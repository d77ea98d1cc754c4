"""Which alarm a worker raises for what it hears, how it travels to the other ranks, and which policies answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindx_elastic.alarm.alarm import Alarm, exit_code_of_signal, signal_name
from mindx_elastic.alarm.deadline import Deadline
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.guard.policy import EXIT_TEMPORARY, ExitPolicy

__all__ = ["Alarms"]

_LEAST_GRACE_S = 3.0  # what somebody else's request cannot shorten


class Alarms:
    """Makes `Alarm`s. Immutable; any thread."""

    def __init__(self, policies: Sequence[ExitPolicy], settings: Settings, ranks: RankInfo) -> None:
        self.policies, self._settings, self._ranks = tuple(policies), settings, ranks

    def of_signal(self, signum: int) -> Alarm:
        code = self._exit_code("signal", exit_code_of_signal(signum))
        return self._make("signal", signal_name(signum), code, signum=signum)

    def of_flag(self, path: object) -> Alarm:
        return self._make("flag", f"flag file {path}", self._exit_code("flag", EXIT_TEMPORARY))

    def of_request(self, reason: str, exit_code: int) -> Alarm:
        """The program itself asked for a stop."""
        return self._make("request", printable(reason, 400), exit_code)

    def of_exception(self, error: BaseException) -> Alarm:
        return self._make("exception", printable(f"exception: {type(error).__name__}: {error}"[:300]), 1)

    def of_death(self, ranks: Sequence[int]) -> Alarm:
        """Other ranks are gone. No step that needs them can end."""
        names = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
        return self._make("peer", f"{names} gone", self._exit_code("peer", EXIT_TEMPORARY))

    def of_orphan(self) -> Alarm:
        """The agent of this machine is gone. Ranks elsewhere must not take it for a stop that somebody wanted."""
        reason = f"the agent of rank {self._ranks.rank} is gone"
        return self._make("signal", reason, EXIT_TEMPORARY)  # no number: whoever answers any signal answers this

    def of_fault(self, reason: str) -> Alarm:
        return self._make("fault", printable(reason, 400), self._exit_code("fault", EXIT_TEMPORARY))

    def of_agent(self, content: Mapping[str, Any]) -> Alarm:
        """The agent of this machine has sent `content` (see `agent_link`)."""
        kind = content["kind"] if content["kind"] in ("fault", "peer", "request") else "request"
        told, grace = content.get("exit_code"), content.get("grace_s")
        known = isinstance(told, int) and not isinstance(told, bool) and 0 <= told <= 255
        code = self._exit_code(kind, told if known else EXIT_TEMPORARY)  # type: ignore[arg-type]
        grace_s = self._settings.grace_s
        if isinstance(grace, (int, float)) and not isinstance(grace, bool) and grace == grace:
            grace_s = min(grace_s, max(0.5, grace))
        return Alarm(kind, printable(content["reason"], 400), Deadline.after(grace_s), code, origin=self._ranks.rank)

    def of_peer(self, content: Mapping[str, Any], *, trusted: bool = False) -> Alarm:
        """Another rank's request, as `for_peers` made it and `stop_request.parse_request` has checked it.

        `trusted`: nobody but a rank of this job can have written it. If not, it may stop the job and no more: how the
        process leaves then follows from this rank's own policies, it never looks like a training that has finished, and
        time enough to save is left.
        """
        kind, signum, told = str(content["kind"]), content.get("signum"), int(content["exit_code"])
        least_s = 0.5 if trusted else min(self._settings.grace_s, _LEAST_GRACE_S)
        grace_s = min(self._settings.grace_s, max(least_s, float(content["grace_left_s"])))
        if kind == "exception":
            code = EXIT_TEMPORARY
        elif trusted:
            code = told
        elif kind == "signal":
            code = EXIT_TEMPORARY if signum is None else self._exit_code("signal", exit_code_of_signal(signum))
        elif kind == "request":
            code = told or EXIT_TEMPORARY
            if not told:
                logger.warning(
                    "rank %s asks for exit code 0, which anybody who reaches the store could do: %d is used. Give all "
                    "ranks a key (MINDX_JOB_KEY_FILE), then it is believed",
                    content["origin"],
                    EXIT_TEMPORARY,
                )
        else:
            code = self._exit_code(kind, EXIT_TEMPORARY)
        return Alarm(
            kind=kind,
            reason=f"{content['reason']} on rank {content['origin']}",
            deadline=Deadline.after(grace_s),
            exit_code=code,
            origin=int(content["origin"]),
            signum=signum,
        )

    def for_peers(self, alarm: Alarm) -> dict[str, Any]:
        return {
            "kind": alarm.kind,
            "reason": alarm.reason,
            "exit_code": alarm.exit_code,
            "origin": alarm.origin,
            "signum": alarm.signum,
            "grace_left_s": alarm.deadline.remaining_s(),
        }

    def answering(self, alarm: Alarm) -> list[ExitPolicy]:
        def answers(policy: ExitPolicy) -> bool:
            if alarm.signum is not None and policy.signals and alarm.signum not in policy.signals:
                return False
            return alarm.kind in policy.alarms

        return [policy for policy in self.policies if answers(policy)]

    def _exit_code(self, kind: str, default: int) -> int:
        for policy in self.policies:
            if kind in policy.alarms and kind in policy.exit_codes:
                return policy.exit_codes[kind]
        return default

    def _make(self, kind: str, reason: str, exit_code: int, *, signum: int | None = None) -> Alarm:
        deadline = Deadline.after(self._settings.grace_s)
        return Alarm(kind, reason, deadline, exit_code, origin=self._ranks.rank, signum=signum)
