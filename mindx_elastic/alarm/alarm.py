"""One alarm: why the job must stop, by when the process must be gone, and with which exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from mindx_elastic.alarm.deadline import Deadline
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY, exit_code, exit_code_from_peer
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import Between, Words, read_text
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import UnmanagedStateError

__all__ = ["ALARM_KINDS", "MAX_REQUEST", "REFUSAL", "REHEARSAL", "Alarm", "Alarms", "StopRequest", "signal_name"]

ALARM_KINDS = frozenset({"signal", "flag", "exception", "fault", "peer", "request"})
"""What policies answer to."""
REFUSAL = "unmanaged"
"""The kind of an `UnmanagedStateError` that leaves the block: every rank stops, and no policy saves anything."""
REHEARSAL = "rehearsal"
"""The kind of a stop that the job orders itself, to try its resume: policies take it for a signal."""
MAX_REQUEST = 16384
"""The longest `StopRequest`, in characters."""
_REQUEST_KINDS = ALARM_KINDS | {REFUSAL, REHEARSAL}
_ASKED_FOR = frozenset({"signal", "flag", "fault", "request"})
_ORPHAN = ("signal", None)
_LEAST_GRACE_S = 3.0  # an unsealed request cannot shorten the grace period further
_LEAST_SEALED_GRACE_S = 0.5
_MAX_GRACE_S = 86400.0
_MAX_REASON = 400
_MAX_EXCEPTION = 300


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """An alarm as the rank that has heard it sends it to the others."""

    kind: str
    """One of `ALARM_KINDS`, `REFUSAL` or `REHEARSAL`."""
    reason: Annotated[str, Words(_MAX_REASON)]
    origin: int
    """The rank."""
    exit_code: Annotated[int, Between(0, 255)]
    signum: Annotated[int, Between(1, 64)] | None = None
    grace_left_s: Annotated[float, Between(-_MAX_GRACE_S, _MAX_GRACE_S)]

    def encode(self) -> str:
        return json.dumps({**asdict(self), "reason": printable(self.reason, _MAX_REASON)})

    @classmethod
    def decode(cls, text: str, world_size: int) -> StopRequest:
        """Raises ValueError for anything that no rank sends."""
        found = read_text(cls, text, MAX_REQUEST)
        if found.kind not in _REQUEST_KINDS:
            raise ValueError(f"{printable(found.kind, 60)!r} is not a kind of alarm")
        if found.origin >= world_size:
            raise ValueError(f"there is no rank {found.origin}: not one of this job's {world_size}")
        return found


class Alarm(NamedTuple):
    """Heard by one rank, sent to all. Immutable; passes between threads."""

    kind: str
    """As `StopRequest.kind`."""
    reason: str
    """For people: ``SIGTERM``, ``flag file /x/graceful_exit.json``, ``exception: ValueError: ...``."""
    deadline: Deadline
    """When the process must be gone."""
    exit_code: int
    """The process exits with it once its state is durable; see `exit_codes`."""
    origin: int = 0
    """Rank that heard it first."""
    signum: int | None = None
    """The signal's number, for kind ``signal``; None there: the agent of `origin` is gone. Also of a ``request`` that
    the agent makes with a signal."""

    @property
    def asked_code(self) -> int:
        """`exit_code` where somebody wants the job to stop; -1: something is wrong with it. An agent also sends SIGTERM
        after a failure: it knows whether it has."""
        asked = self.kind in _ASKED_FOR and (self.kind, self.signum) != _ORPHAN
        return self.exit_code if asked else -1

    def to_request(self) -> StopRequest:
        """Asks the other ranks to stop for this alarm; `Alarms.of_peer` is the way back."""
        return StopRequest(
            kind=self.kind,
            reason=self.reason,
            exit_code=self.exit_code,
            origin=self.origin,
            signum=self.signum,
            grace_left_s=self.deadline.remaining_s(),
        )


class Alarms:
    """Makes the alarms of one rank: reason, deadline, exit code. Immutable; any thread."""

    def __init__(self, settings: Settings, ranks: RankInfo, exit_codes: Mapping[str, int]) -> None:
        """`exit_codes`: what policies want instead of the usual code, by kind."""
        self._settings, self._ranks, self._exit_codes = settings, ranks, dict(exit_codes)

    def of_signal(self, signum: int) -> Alarm:
        code = exit_code("signal", self._exit_codes, signum=signum)
        return self._make("signal", signal_name(signum), code, signum=signum)

    def of_flag(self, path: object) -> Alarm:
        return self._make("flag", f"flag file {path}", exit_code("flag", self._exit_codes))

    def of_request(self, reason: str, code: int) -> Alarm:
        """The program itself asked for a stop, and names the exit code."""
        return self._make("request", printable(reason, _MAX_REASON), exit_code("request", named=code))

    def of_rehearsal(self, step: int) -> Alarm:
        """The job tries its own resume, at the boundary `step`; the agent reads the reason (`agent.endings`)."""
        return self._make(REHEARSAL, f"{REHEARSAL} at step {step}", EXIT_TEMPORARY)

    def of_agent_signal(self, signum: int) -> Alarm:
        """The signal with which the agent stops its workers, in a process whose policies do not ask for signals."""
        return self.of_request(signal_name(signum), exit_code("signal", signum=signum))._replace(signum=signum)

    def of_exception(self, error: BaseException) -> Alarm:
        reason = f"exception: {type(error).__name__}: {error}".rstrip(": ")[:_MAX_EXCEPTION]
        kind = REFUSAL if isinstance(error, UnmanagedStateError) and not error.saves else "exception"
        return self._make(kind, printable(reason), exit_code(kind))

    def of_death(self, ranks: Sequence[int]) -> Alarm:
        """The processes of other ranks have died: no step that needs them can end."""
        names = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
        return self._make("peer", f"{names} gone", exit_code("peer", self._exit_codes))

    def of_orphan(self) -> Alarm:
        """The agent of this machine is gone. A ``signal`` without a number: every policy that answers signals answers
        this, and other ranks do not take it for a stop that was asked for."""
        return self._make("signal", f"the agent of rank {self._ranks.rank} is gone", exit_code("signal"))

    def of_fault(self, reason: str) -> Alarm:
        return self._make("fault", printable(reason, _MAX_REASON), exit_code("fault", self._exit_codes))

    def of_agent(self, content: Mapping[str, Any]) -> Alarm:
        """The agent of this machine has sent the order `content` (see `guard.agent_link`)."""
        kind = content["kind"] if content["kind"] in ("fault", "peer", "request") else "request"
        named, grace = content.get("exit_code"), content.get("grace_s")
        is_code = isinstance(named, int) and not isinstance(named, bool) and 0 <= named <= 255
        code = exit_code(kind, self._exit_codes, named=named if is_code else None)
        grace_s = self._settings.grace_s
        if isinstance(grace, (int, float)) and not isinstance(grace, bool) and grace == grace:
            longest_s = _MAX_GRACE_S if content.get("extends") is True else grace_s
            grace_s = min(longest_s, max(0.5, grace))
        return self._make(kind, printable(content["reason"], _MAX_REASON), code, grace_s=grace_s)

    def of_peer(self, request: StopRequest, *, is_sealed: bool = False) -> Alarm:
        """Another rank's request.

        `is_sealed`: only a rank of this job can have written it. If not, the request may stop the job and no more: it
        cannot choose the exit code, and enough time to save remains; nor can it lengthen the time.
        """
        kind, signum, named = request.kind, request.signum, request.exit_code
        least_s = _LEAST_SEALED_GRACE_S if is_sealed else min(self._settings.grace_s, _LEAST_GRACE_S)
        longest_s = _MAX_GRACE_S if is_sealed else self._settings.grace_s
        if kind == "request" and named == 0 and not is_sealed:
            logger.warning(
                "rank %s asks for exit code 0, but without a job key any process that reaches the store can ask for "
                "that: %d is used. Give all ranks the same key (MINDX_JOB_KEY_FILE)",
                request.origin,
                EXIT_TEMPORARY,
            )
        return Alarm(
            kind=kind,
            reason=f"{request.reason} on rank {request.origin}",
            deadline=Deadline.after(min(longest_s, max(least_s, request.grace_left_s))),
            exit_code=exit_code_from_peer(kind, self._exit_codes, signum=signum, named=named, is_sealed=is_sealed),
            origin=request.origin,
            signum=signum,
        )

    def _make(
        self, kind: str, reason: str, code: int, *, signum: int | None = None, grace_s: float | None = None
    ) -> Alarm:
        deadline = Deadline.after(self._settings.grace_s if grace_s is None else grace_s)
        return Alarm(kind, reason, deadline, code, origin=self._ranks.rank, signum=signum)


def signal_name(signum: int) -> str:
    """``SIGTERM`` for 15; ``signal 40`` where the platform has no name for it."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
