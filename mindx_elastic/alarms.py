"""Which alarm a worker raises for what it hears, how it travels to the other ranks, and which policies answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindx_elastic.alarm.alarm import Alarm, exit_code_of_signal, signal_name
from mindx_elastic.alarm.deadline import Deadline
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.policy import EXIT_TEMPORARY, ExitPolicy

__all__ = ["Alarms"]


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
        return self._make("request", reason, exit_code)

    def of_exception(self, error: BaseException) -> Alarm:
        return self._make("exception", f"exception: {type(error).__name__}: {error}"[:300], 1)

    def of_death(self, ranks: Sequence[int]) -> Alarm:
        """Other ranks are gone. No step that needs them can end."""
        names = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
        return self._make("peer", f"{names} gone", self._exit_code("peer", EXIT_TEMPORARY))

    def of_orphan(self) -> Alarm:
        """The agent of this machine is gone. Ranks elsewhere must not take it for a stop that somebody wanted."""
        reason = f"the agent of rank {self._ranks.rank} is gone"
        return self._make("signal", reason, EXIT_TEMPORARY)  # no number: whoever answers any signal answers this

    def of_fault(self, reason: str) -> Alarm:
        return self._make("fault", reason, self._exit_code("fault", EXIT_TEMPORARY))

    def of_agent(self, content: Mapping[str, Any]) -> Alarm:
        """The agent of this machine has sent `content` (see `agent_link`)."""
        kind = content["kind"] if content["kind"] in ("fault", "peer", "request") else "request"
        code = self._exit_code(kind, int(content.get("exit_code", EXIT_TEMPORARY)))
        grace_s = min(self._settings.grace_s, max(0.5, float(content.get("grace_s", self._settings.grace_s))))
        return Alarm(kind, str(content["reason"]), Deadline.after(grace_s), code, origin=self._ranks.rank)

    def of_peer(self, content: Mapping[str, Any]) -> Alarm:
        """Another rank's request, as `for_peers` made it."""
        grace_s = min(self._settings.grace_s, float(content["grace_left_s"]))
        return Alarm(
            kind=str(content["kind"]),
            reason=f"{content['reason']} on rank {content['origin']}",
            deadline=Deadline.after(max(0.5, grace_s)),
            exit_code=EXIT_TEMPORARY if content["kind"] == "exception" else int(content["exit_code"]),
            origin=int(content["origin"]),
            signum=content.get("signum"),
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
