"""The timeline of one attempt, with workers that only pretend."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.agent.attempt import Attempt, AttemptContext, _culprits
from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.hang import HangWatch, Stuck
from mindx_elastic.agent.inbox import SignalInbox
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.cluster.messages import News
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL, AgentFolder
from mindx_elastic.platforms.fault_watch import FaultEvent
from mindx_elastic.rejoin.protocol import Phase

TERM, KILL, INT = int(signal.SIGTERM), int(signal.SIGKILL), int(signal.SIGINT)
ORDER = int(CONTROL_SIGNAL)
IN_TRAINING = Status(pid=1, phase=WorkerPhase.TRAINING, step=3, boundaries=3, entered_ns=1, boundary_ns=1)


class Clock:
    """Stands in for the module `time`: it goes on while the agent waits, and at no other time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


clock = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindx_elastic.agent.attempt.time", clock)


class Workers:
    """Stands in for `mindx_elastic.agent.workers.Workers`.

    react: by rank what happens on a signal: a function that gets its number and gives an exit code, or None to go on.
    """

    def __init__(self, pages: dict[int, Status | None], react: Callable[[int, int], int | None]) -> None:
        self.pages, self.react = pages, react
        self.processes = dict.fromkeys(pages, SimpleNamespace(pid=1))
        self.live: dict[int, Any] = dict(self.processes)
        self.exits: list[WorkerExit] = []
        self.sent: dict[int, list[int]] = {rank: [] for rank in pages}
        self.coming: list[tuple[float, int, int]] = []
        """Exits to come: (time, rank, code)."""
        self.waits: object = None

    def wait(self, timeout_s: float, fds: Iterable[int] = ()) -> list[WorkerExit]:
        clock.now += max(0.001, min(timeout_s, 0.02))
        found = []
        for when, rank, code in sorted(self.coming):
            if when <= clock.now and rank in self.live:
                del self.live[rank]
                status = self.pages[rank]
                if status is not None and code >= 0 and status.phase < WorkerPhase.LEFT:
                    status = status._replace(phase=WorkerPhase.LEFT, exit_code=code)
                sent = frozenset(self.sent[rank])
                self.coming.remove((when, rank, code))
                found.append(WorkerExit(rank=rank, pid=1, code=code, status=status, sent=sent))
        self.exits += found
        return found

    def end(self, rank: int, code: int) -> None:
        self.coming.append((clock.now, rank, code))

    def send(self, rank: int, signum: int) -> None:
        self.sent[rank].append(int(signum))
        code = self.react(rank, int(signum))
        if code is not None:
            self.end(rank, code)

    def call(self, rank: int) -> None:
        self.send(rank, ORDER)

    def kill(self, rank: int) -> None:
        self.sent[rank].append(KILL)
        self.end(rank, -KILL)

    def status(self, rank: int) -> Status | None:
        return self.pages[rank]

    def statuses(self) -> dict[int, Status]:
        return {rank: page for rank in self.live if (page := self.pages[rank]) is not None}

    def look_for_early_signs(self) -> None:
        pass

    def is_guarded(self, rank: int) -> bool:
        page = self.pages[rank]
        return page is not None and page.phase < WorkerPhase.LEFT

    def catches(self, rank: int, signum: int) -> bool:
        return signum in (TERM, INT)


class Faults:
    """Says what it is told to, once."""

    def __init__(self) -> None:
        self.event: FaultEvent | None = None

    def poll(self) -> FaultEvent | None:
        event, self.event = self.event, None
        return event


@pytest.fixture
def inbox() -> Iterator[SignalInbox]:
    with SignalInbox([signal.SIGUSR1]) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path, inbox: SignalInbox) -> Callable[..., Ending]:
    def attempt(workers: Workers, *, grace_s: float = 30.0, faults: Faults | None = None, **more: Any) -> Ending:
        context = AttemptContext(
            folder=AgentFolder(tmp_path),
            inbox=inbox,
            hang=HangWatch(more.get("hang_timeout_s", 0)),
            stop_files=faults or Faults(),  # type: ignore[arg-type]
            membership=more.get("membership"),
            events=EventLog(tmp_path / "events.jsonl"),
            grace_s=grace_s,
            stacks=tmp_path / "stacks",
            on_look=lambda statuses: None,
            recovery=more.get("recovery", lambda workers: None),
        )
        made = Attempt(workers, context, number=0)  # type: ignore[arg-type]
        more.get("made", []).append(made)
        return made.run()

    return attempt


def ignore(rank: int, signum: int) -> int | None:
    return None


def obey(rank: int, signum: int) -> int | None:
    """A script without a guard."""
    return -signum if signum in (TERM, INT) else None


def guard(rank: int, signum: int) -> int | None:
    return {ORDER: 75, TERM: 143, INT: 130}.get(signum)


class Replacing:
    """Stands in for `mindx_elastic.agent.recovery.Recovery`: two dead ranks get new processes, which finish."""

    must_kill, is_out, reason = False, False, ""
    fds: tuple[int, ...] = ()

    def __init__(self, workers: Workers) -> None:
        self.workers, self.replaced = workers, list[int]()
        self.is_active = False

    def prepare(self) -> None:
        pass

    def why_not(self, ranks: list[int], end: WorkerExit | None = None) -> str:
        return ""

    def begin(self, end: WorkerExit, cause: str, *, stuck_s: float = 0.0) -> bool:
        self.is_active = True
        self.hear_end(end)
        return True

    def hear_end(self, end: WorkerExit) -> None:
        self.replaced.append(end.rank)
        self.workers.exits = [each for each in self.workers.exits if each.rank != end.rank]
        self.workers.pages[end.rank] = IN_TRAINING._replace(pid=2, boundaries=0, entered_ns=clock.monotonic_ns())
        self.workers.live[end.rank] = self.workers.processes[end.rank]

    @property
    def phase(self) -> Phase:
        return Phase.CUT if self.is_active else Phase.RUN

    def look(self) -> Phase:
        if len(self.replaced) < 2:
            return Phase.CUT
        if self.is_active:
            self.is_active = False
            for rank in list(self.workers.live):
                self.workers.end(rank, 0)
        return Phase.RUN

    def look_at_first_step(self, statuses: dict[int, Status]) -> bool:
        return True

    def close(self) -> None:
        pass


def test_two_ranks_killed_for_one_hang_are_not_blamed_when_their_replacements_finish(
    run: Callable[..., Ending],
) -> None:
    pages: dict[int, Status | None] = {0: IN_TRAINING, 1: IN_TRAINING}
    pages[2] = IN_TRAINING._replace(boundaries=0, entered_ns=clock.monotonic_ns())
    made: list[Replacing] = []

    def recovery(workers: Workers) -> Replacing:
        made.append(Replacing(workers))
        return made[-1]

    ending = run(Workers(pages, ignore), hang_timeout_s=1.0, recovery=recovery)
    assert sorted(made[0].replaced) == [0, 1]
    assert ending.outcome == "finished"


@pytest.mark.parametrize(("states", "found"), [("SRS", [1]), ("SSD", [2]), ("SST", [2]), ("SSS", []), ("RRR", [])])
def test_who_the_others_wait_for_in_the_same_step(states: str, found: list[int]) -> None:
    stuck = [Stuck(rank, 3, 60.0) for rank in range(3)]
    assert _culprits(stuck, dict(enumerate(states)), dict.fromkeys(range(3), IN_TRAINING)) == found


def test_after_a_failure_plain_workers_get_sigterm_and_guarded_ones_an_order(run: Callable[..., Ending]) -> None:
    def react(rank: int, signum: int) -> int | None:
        return obey(rank, signum) if rank == 1 else guard(rank, signum)

    workers = Workers({0: IN_TRAINING, 1: None, 2: None}, react)
    workers.end(2, -KILL)
    ending = run(workers)
    assert (ending.outcome, ending.code, ending.rank) == ("failed", 137, 2)
    assert workers.sent == {0: [ORDER], 1: [TERM], 2: []}


def test_who_does_not_stop_is_urged_and_then_killed(run: Callable[..., Ending]) -> None:
    workers = Workers({0: IN_TRAINING, 1: None, 2: None}, ignore)
    workers.end(2, 1)
    started = clock.now
    assert run(workers, grace_s=0.6).code == 1
    assert clock.now - started == pytest.approx(0.6, abs=0.05)
    assert workers.sent[0] == [ORDER, TERM, KILL], "an order, at half time a SIGTERM, at the end SIGKILL"
    assert workers.sent[1] == [TERM, KILL]


def test_who_has_saved_may_take_a_moment_longer_to_exit(run: Callable[..., Ending], inbox: SignalInbox) -> None:
    def react(rank: int, signum: int) -> int | None:
        workers.pages[rank] = IN_TRAINING._replace(phase=WorkerPhase.STOPPING, saved_step=3, saved_ns=1, exit_code=143)
        if rank == 0:
            workers.coming.append((clock.now + 1.5, rank, 143))
        return None

    inbox.heard.append(TERM)
    workers = Workers({0: IN_TRAINING, 1: IN_TRAINING}, react)
    started = clock.now
    assert run(workers, grace_s=1.0).code == 143
    assert clock.now - started == pytest.approx(4.0, abs=0.05)
    assert workers.sent == {0: [TERM], 1: [TERM, KILL]}


def test_a_signal_that_a_guard_would_die_of_becomes_sigterm(run: Callable[..., Ending], inbox: SignalInbox) -> None:
    inbox.heard.append(signal.SIGHUP)
    workers = Workers({0: IN_TRAINING, 1: None}, lambda rank, signum: 143 if rank == 0 else -signum)
    assert run(workers).code == 143
    assert workers.sent == {0: [TERM], 1: [signal.SIGHUP]}


def test_a_signal_during_a_failure_forbids_the_restart(run: Callable[..., Ending], inbox: SignalInbox) -> None:
    def react(rank: int, signum: int) -> int | None:
        inbox.heard.append(TERM)
        return 75

    workers = Workers({0: IN_TRAINING, 1: None}, react)
    workers.end(1, -KILL)
    ending = run(workers)
    assert (ending.outcome, ending.code) == ("stopped", 75)


def test_when_one_leaves_gracefully_the_others_may_too(run: Callable[..., Ending]) -> None:
    workers = Workers({0: IN_TRAINING, 1: IN_TRAINING}, ignore)
    workers.end(1, 143)
    workers.coming.append((clock.now + 0.3, 0, 143))
    ending = run(workers)
    assert (ending.outcome, ending.code) == ("stopped", 143)
    assert workers.sent == {0: [], 1: []}


class Nodes:
    """Stands in for `Membership`."""

    def __init__(self, inbox: SignalInbox, *, waiting: int = 0, lost: str = "") -> None:
        self.news, self.lost = News(waiting, (), ""), lost
        self.wakeup = SimpleNamespace(fd=inbox.fd, drain=lambda: None)

    def ask(self) -> News:
        return self.news


def test_a_node_that_waits_makes_everybody_meet_anew(run: Callable[..., Ending], inbox: SignalInbox) -> None:
    workers = Workers({0: IN_TRAINING, 1: None}, lambda rank, signum: 143 if rank == 0 else -signum)
    assert run(workers, membership=Nodes(inbox, waiting=1)).outcome == "membership"
    assert workers.sent == {0: [TERM], 1: [TERM]}


@pytest.mark.parametrize("phase", [WorkerPhase.STOPPING, WorkerPhase.LEFT])
def test_a_node_that_waits_while_a_rank_fails_takes_the_place_of_a_lost_one(
    run: Callable[..., Ending], inbox: SignalInbox, phase: WorkerPhase
) -> None:
    page = IN_TRAINING._replace(phase=phase, reason="exception: RuntimeError: Connection closed by peer")
    workers = Workers({0: page}, guard)
    workers.coming.append((clock.now + 5.0, 0, -6))
    ending = run(workers, membership=Nodes(inbox, waiting=1))
    assert (ending.outcome, workers.sent[0]) == ("failed", [])


@pytest.mark.parametrize("page", [IN_TRAINING, None])
def test_a_lost_node(page: Status | None, run: Callable[..., Ending], inbox: SignalInbox) -> None:
    """Guarded workers that do not get on are told; without a guard they find out by themselves."""
    workers = Workers({0: page}, lambda rank, signum: 75)
    workers.coming.append((clock.now + 60.0, 0, 1))
    ending = run(workers, membership=Nodes(inbox, lost="only 1 of 2 nodes give a sign of life"))
    assert ending.outcome == "failed"
    if page is None:
        assert (ending.code, ending.cause, workers.sent[0]) == (1, "exit code 1", [])
    else:
        assert (ending.code, workers.sent[0], ending.elsewhere) == (75, [ORDER], True)
        assert ending.cause == "a node is lost: only 1 of 2 nodes give a sign of life"


# --- after the training ---


def past(*, finished: bool = True, **more: Any) -> Status:
    """A guard that was left."""
    return IN_TRAINING._replace(phase=WorkerPhase.LEFT, finished=int(finished), **more)


def test_what_is_done_after_the_training_needs_no_other_node(run: Callable[..., Ending], inbox: SignalInbox) -> None:
    """The others have ended, the host of the rendezvous among them; or a new one comes."""
    for nodes in (Nodes(inbox, lost="no answer"), Nodes(inbox, waiting=1)):
        workers = Workers({0: past()}, ignore)
        workers.coming.append((clock.now + 60.0, 0, 0))
        assert run(workers, membership=nodes).outcome == "finished"
        assert workers.sent[0] == []
