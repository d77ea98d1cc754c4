"""Which order the workers need so that the commands `pause` and `resume` come true, and what the commands are told.

The agent gives an order to the ranks of its node; they agree with those of the other nodes (`guard.pausing`) and say on
their pages where they stand. So the pages are all that is known here, also of a pause that was given on another node.

A pause waits until every rank waits, and is taken back at its time-out, where a rank has finished, and for a `resume`.
A `resume` waits until no rank of this node is pausing; a pause that comes meanwhile waits for that.

Pure: times are passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.memory.agent_folder import PAUSE, RESUME

__all__ = ["Answer", "Order", "PauseChange", "PauseRequest", "PauseWatch", "is_between_steps"]

_GUARDED = (WorkerPhase.TRAINING, WorkerPhase.BETWEEN)
_BY_COMMAND = "mindx-elastic pause"
_TAKE_BACK_S = 30.0  # for a resume that no command waits for
_WORDS = {
    WorkerPhase.STARTING: "entering its guard",
    WorkerPhase.TRAINING: "in a step",
    WorkerPhase.BETWEEN: "in an evaluation or a save",
    WorkerPhase.STOPPING: "stopping",
    WorkerPhase.LEFT: "past its guard",
}


@dataclass(frozen=True)
class PauseRequest:
    """One command that waits for its answer."""

    id: str
    kind: str
    """`PAUSE` or `RESUME`."""
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    """How a command has ended."""

    good: bool
    """It is as the command wants it."""
    text: str
    """One line for the user."""
    step: int | None = None
    """Where the ranks wait, or have waited."""


@dataclass(frozen=True)
class Order:
    """For all ranks of the node that are in their guards."""

    kind: str
    """`PAUSE` or `RESUME`."""
    reason: str


@dataclass(frozen=True)
class PauseChange:
    """Every rank has begun to wait, or they go on."""

    step: int
    begins: bool
    seconds: float
    """Of a begin: since the order was given, as far as it was given here. Of an end: how long they have waited."""
    why: str = ""
    """Of an end."""


class PauseWatch:
    """Looks at the workers' pages, again and again."""

    def __init__(self) -> None:
        self.answers: list[tuple[PauseRequest, Answer]] = []
        """To be handed out; the caller takes them from here."""
        self.changes: list[PauseChange] = []
        """Likewise."""
        self._waiting: list[tuple[PauseRequest, float]] = []
        """With the time of their time-outs."""
        self._order: Order | None = None
        """What is being carried out; None: nothing."""
        self._order_number: int | None = None
        """Under which it was written for the workers; None: not yet."""
        self._ordered_at = 0.0
        self._until = 0.0
        """Of a RESUME."""
        self._base = 0
        """The newest order that a rank knew when the PAUSE was given."""
        self._paused: tuple[int, float] | None = None
        """At which step every rank waits, and since when."""
        self._seen_step = -1

    @property
    def is_busy(self) -> bool:
        """Whether a command waits, so that looks should come often."""
        return bool(self._waiting) or self._order is not None

    @property
    def paused_step(self) -> int | None:
        """Where every rank waits; None: they do not."""
        return None if self._paused is None else self._paused[0]

    def ask(self, request: PauseRequest, now: float) -> None:
        """A command has come."""
        self._waiting.append((request, now + request.timeout_s))

    def look(self, statuses: Mapping[int, Status], num_live: int, now: float) -> Order | None:
        """The order that the ranks of this node are to have now; None: none. The same one until it is carried out.

        statuses: the pages of the living workers, of which there are `num_live`.
        """
        self._note_change(statuses, num_live, now)
        if self._order is not None and self._order.kind == PAUSE:
            self._look_at_pause(statuses, num_live, now)
        if self._order is not None and self._order.kind == RESUME:
            self._look_at_resume(statuses, now)
        if self._order is None and self._waiting:
            self._begin_next(statuses, num_live, now)
        return self._order

    def note_written(self, number: int) -> None:
        """The order is there for the workers to read, under this number."""
        self._order_number = number

    def needs(self, status: Status) -> bool:
        """Whether the rank with this page has yet to be told of the order."""
        return status.phase in _GUARDED and (self._order_number is None or status.pause_heard < self._order_number)

    def end(self, why: str, now: float) -> None:
        """The workers are being stopped, or have ended."""
        for request, _ in self._waiting:
            pauses = request.kind == PAUSE
            text = f"not paused: {why}" if pauses else f"no rank waits any more: {why}"
            self.answers.append((request, Answer(not pauses, text)))
        if self._paused is not None:
            self.changes.append(PauseChange(self._paused[0], False, now - self._paused[1], why))
        self._waiting.clear()
        self._order = self._paused = None

    # --- what the pages say -------------------------------------------------------------------------------------------

    def _note_change(self, statuses: Mapping[int, Status], num_live: int, now: float) -> None:
        all_wait = _all_wait(statuses, num_live)
        if all_wait and self._paused is None:
            step = max(status.paused_step for status in statuses.values())
            took_s = now - self._ordered_at if self._order is not None and self._order.kind == PAUSE else 0.0
            self._paused = step, now
            self.changes.append(PauseChange(step, True, took_s))
        elif not all_wait and self._paused is not None:
            self._seen_step = self._paused[0]
            gone_on = [status for status in statuses.values() if status.pause_order and not status.pause_order % 2]
            reasons = sorted({status.pause_reason for status in gone_on} - {""})
            why = "; ".join(reasons) or "ranks stop, or were replaced"
            self.changes.append(PauseChange(self._paused[0], False, now - self._paused[1], why))
            self._paused = None

    def _begin_next(self, statuses: Mapping[int, Status], num_live: int, now: float) -> None:
        kind = self._waiting[0][0].kind
        if kind == RESUME:
            if not _any_pauses(statuses):
                self._answer(RESUME, Answer(True, "the run is not paused; nothing to do"))
                return
            self._give(RESUME, "mindx-elastic resume", now, until=self._waiting[0][1])
            return
        if self._paused is not None:
            step, since = self._paused
            self._answer(PAUSE, Answer(True, f"paused at step {step} already, for {now - since:.0f} s", step))
            return
        self._base = _newest(statuses)
        self._give(PAUSE, _BY_COMMAND, now)
        self._look_at_pause(statuses, num_live, now)

    def _give(self, kind: str, reason: str, now: float, *, until: float = 0.0) -> None:
        self._order, self._ordered_at, self._until = Order(kind, reason), now, until
        self._order_number = None

    def _answer(self, kind: str, content: Answer) -> None:
        for each in [each for each in self._waiting if each[0].kind == kind]:
            self._waiting.remove(each)
            self.answers.append((each[0], content))

    # --- a pause ------------------------------------------------------------------------------------------------------

    def _look_at_pause(self, statuses: Mapping[int, Status], num_live: int, now: float) -> None:
        if self._paused is not None:
            self._answer(PAUSE, Answer(True, f"paused at step {self._paused[0]}: every rank waits", self._paused[0]))
            self._order = None
            return
        finished = [rank for rank, status in sorted(statuses.items()) if status.finished]
        if finished:
            step = statuses[finished[0]].step
            self._take_back(f"the training has finished (rank {finished[0]}, step {step})", now)
        elif any(request.kind == RESUME for request, _ in self._waiting):
            self._take_back("mindx-elastic resume was given before every rank waited", now)
        elif _newest(statuses) > self._base and not _any_pauses(statuses):
            reasons = sorted({status.pause_reason for status in statuses.values()} - {"", _BY_COMMAND})
            why = "; ".join(reasons) or "the ranks have gone on, because they stop or were replaced"
            self._answer(PAUSE, Answer(False, f"not paused: {why}"))
            self._order = None
        else:
            late = [each for each in self._waiting if each[0].kind == PAUSE and each[1] <= now]
            if late and len(late) == sum(request.kind == PAUSE for request, _ in self._waiting):
                self._take_back(f"{_who_is_missing(statuses, num_live)} in {late[-1][0].timeout_s:g} s", now)

    def _take_back(self, why: str, now: float) -> None:
        self._answer(PAUSE, Answer(False, f"not paused: {why}; the pause is taken back and training goes on"))
        self._give(RESUME, f"the pause was taken back: {why}", now, until=now + _TAKE_BACK_S)

    # --- a resume -----------------------------------------------------------------------------------------------------

    def _look_at_resume(self, statuses: Mapping[int, Status], now: float) -> None:
        heard = not any(self.needs(status) for status in statuses.values())  # else one may just be passing on a pause
        if heard and not _any_pauses(statuses):
            where = f" from step {self._seen_step}" if self._seen_step >= 0 else ""
            self._answer(RESUME, Answer(True, f"training goes on{where}", self._seen_step))
        elif now > self._until:
            ranks = [r for r, status in sorted(statuses.items()) if status.pause_order % 2 or self.needs(status)]
            text = f"ranks {', '.join(map(str, ranks))} have not gone on; their watchers do not answer"
            self._answer(RESUME, Answer(False, text))
        else:
            return
        self._order, self._seen_step = None, -1


def _any_pauses(statuses: Mapping[int, Status]) -> bool:
    return any(status.pause_order % 2 for status in statuses.values() if status.phase in _GUARDED)


def _all_wait(statuses: Mapping[int, Status], num_live: int) -> bool:
    orders = {status.all_paused for status in statuses.values() if status.phase in _GUARDED}
    return len(statuses) == num_live and len(orders) == 1 and 0 not in orders


def _newest(statuses: Mapping[int, Status]) -> int:
    return max((status.pause_order for status in statuses.values()), default=0)


def _who_is_missing(statuses: Mapping[int, Status], num_live: int) -> str:
    late = {rank: status for rank, status in sorted(statuses.items()) if not status.paused_ns}
    if late:
        rank, status = next(iter(late.items()))
        where = f"after step {status.step}" if status.boundaries else "before its first step"
        others = f" and {len(late) - 1} more" if len(late) > 1 else ""
        return f"rank {rank} ({_word(status)}, {where}){others} did not come to the boundary"
    if len(statuses) < num_live:
        return f"{num_live - len(statuses)} of {num_live} ranks of this node did not enter a mindx_elastic guard"
    return "the ranks of the other nodes did not come to the boundary"


def _word(status: Status) -> str:
    return next((word for phase, word in _WORDS.items() if phase == status.phase), "starting")


def is_between_steps(status: Status) -> bool:
    """Whether a rank may be at work between two steps, so that no step need be expected of it. Not in a pause."""
    return status.phase == WorkerPhase.BETWEEN and not status.paused_ns
