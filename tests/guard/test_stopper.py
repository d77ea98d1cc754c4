"""The state machine of a stop: one alarm, one claim, one outcome."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mindx_elastic.agreement.exchange import LocalExchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.agreement.stop_step import Decision, Offer
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.errors import GracefulExit, SaveError
from mindx_elastic.guard.policy import ExitPolicy, breakpoint_name
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stop_phase import MOVES, StopPhase
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.persist.format import read_header
from tests.harness import events, wait_until


class Parts:
    """A stopper with everything around it, and no guard: the test plays watcher and training thread."""

    def __init__(self, directory: Path, *, grace_s: float = 30.0, **policy: Any) -> None:
        self.directory = directory
        self.gate, self.steps = UpdateGate(), StepGate(5)
        self.collector = Collector({"model": nn.Linear(2, 2)})
        self.collector.copy(Position(step=5, epoch=1, step_in_epoch=5))
        self.events = EventLog(directory / "events.jsonl")
        self.watcher = Watcher(lambda signum: None)
        self.durable: Path | None = None
        fields: dict[str, Any] = {
            "kind": "breakpoint",
            "alarms": frozenset({"signal", "exception", "request", "flag", "peer"}),
            "name": breakpoint_name("net"),
            "directory": directory,
        }
        self.policy = ExitPolicy(**{**fields, **policy})
        self.saver = Saver(self.collector, RankInfo(), self.events)
        self.stopper = Stopper(
            step_gate=self.steps,
            update_gate=self.gate,
            exchange=LocalExchange(),
            watcher=self.watcher,
            saver=self.saver,
            ranks=RankInfo(),
            settings=Settings(grace_s=grace_s),
            policies=[self.policy],
            events=self.events,
            already_durable=lambda: self.durable,
        )

    def reach(self, step: int) -> bool:
        """The training thread passes boundary `step`; whether it is held there."""
        self.gate.pass_boundary(lambda: self.collector.copy(Position(step=step, epoch=1, step_in_epoch=step)))
        return self.steps.arrive(step)

    def files(self) -> list[int]:
        return [read_header(path).info.step for path in self.directory.glob("*.safetensors")]


Make = Callable[..., Parts]


@pytest.fixture
def make_parts(tmp_path: Path) -> Iterator[Make]:
    made: list[Parts] = []

    def make(**options: Any) -> Parts:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Parts(directory, **options))
        return made[-1]

    yield make
    for parts in made:
        parts.watcher.stop()


@pytest.fixture
def parts(make_parts: Make) -> Parts:
    return make_parts()


def test_a_signal_lets_the_training_thread_run_to_the_coming_boundary(parts: Parts) -> None:
    parts.stopper.hear_signal(signal.SIGTERM)
    assert (parts.stopper.phase, parts.files()) == (StopPhase.STOPPING, [])
    assert parts.reach(6)
    with pytest.raises(GracefulExit) as caught:
        parts.stopper.at_limit(is_cut=True)
    leaving = caught.value
    assert (leaving.code, leaving.reason, leaving.step) == (143, "SIGTERM", 6)
    assert leaving.path == parts.directory / "net-1_6_breakpoint.safetensors"
    assert (parts.stopper.phase, parts.files()) == (StopPhase.SAVED, [6])
    (durable,) = events(parts.directory, "durable")
    assert (durable["step"], durable["path"], durable["reason"]) == (6, str(leaving.path), "SIGTERM")


def test_between_two_steps_the_watcher_saves_the_boundary_that_is_there(parts: Parts) -> None:
    parts.steps.leave_step()
    parts.stopper.hear_signal(signal.SIGTERM)
    assert parts.stopper.phase is StopPhase.SAVED and parts.files() == [5]
    assert parts.steps.at_limit()
    with pytest.raises(GracefulExit):
        parts.stopper.at_limit(is_cut=True)


def test_a_second_alarm_changes_nothing(parts: Parts) -> None:
    parts.stopper.hear_signal(signal.SIGTERM)
    first = parts.stopper.alarm
    parts.stopper.hear_signal(signal.SIGINT)
    parts.stopper.hear(parts.stopper.alarms.of_flag(Path("flag.json")))
    parts.stopper.hear(parts.stopper.alarms.of_request("enough", 0))
    parts.stopper.hear(
        parts.stopper.alarms.of_peer({"kind": "signal", "reason": "x", "exit_code": 1, "origin": 1, "grace_left_s": 1})
    )
    assert parts.stopper.alarm is first
    assert [e["outcome"] for e in events(parts.directory, "alarm")] == ["stopping", "already stopping"]


def test_an_open_window_is_passed_over_until_its_end(parts: Parts) -> None:
    parts.stopper.hear_signal(signal.SIGTERM)
    for step in (6, 7):
        assert parts.steps.arrive(step)
        parts.stopper.at_limit(is_cut=False)
    assert parts.files() == []
    assert parts.reach(8)
    with pytest.raises(GracefulExit):
        parts.stopper.at_limit(is_cut=True)
    assert parts.files() == [8]


def test_an_exception_saves_the_boundary_before_it(parts: Parts) -> None:
    parts.stopper.on_exception(ValueError("broken"))
    assert (parts.stopper.phase, parts.files()) == (StopPhase.SAVED, [5])
    alarm = parts.stopper.alarm
    assert alarm is not None
    assert (alarm.kind, alarm.reason, alarm.exit_code) == ("exception", "exception: ValueError: broken", 1)


def test_a_very_long_exception_text_is_cut(parts: Parts) -> None:
    parts.stopper.on_exception(ValueError("x" * 100_000))
    assert parts.stopper.alarm is not None and len(parts.stopper.alarm.reason) <= 300


def test_an_exception_that_no_policy_wants_is_left_alone(make_parts: Make) -> None:
    parts = make_parts(alarms=frozenset({"signal"}))
    parts.stopper.on_exception(ValueError("broken"))
    assert (parts.stopper.phase, parts.files()) == (StopPhase.TRAINING, [])


@pytest.mark.parametrize("state", ["updating", "dirty"])
def test_a_torn_state_is_refused(parts: Parts, state: str) -> None:
    parts.gate.begin_update()
    if state == "dirty":
        parts.gate.end_update()
    parts.stopper.on_exception(ValueError("broken"))
    assert (parts.stopper.phase, parts.files()) == (StopPhase.FAILED, [])
    assert parts.stopper.failure
    (save,) = events(parts.directory, "save")
    assert save["outcome"] == "refused: state is not at a boundary"


class Recording(LocalExchange):
    """Keeps what was offered in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.offers: list[tuple[str, Offer]] = []

    def decide(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        self.offers.append((name, offer))
        return super().decide(name, offer, timeout_s)


def test_a_salvage_in_the_middle_of_an_update_offers_the_boundary_it_leads_to(make_parts: Make) -> None:
    """Not CANNOT, which would make every rank act alone for the sake of a step that takes milliseconds more."""
    parts = make_parts(grace_s=2.0)
    exchange = parts.stopper.exchange = Recording()
    parts.gate.begin_update()
    parts.stopper.hear(
        parts.stopper.alarms.of_peer(
            {"kind": "exception", "reason": "x", "exit_code": 1, "origin": 1, "grace_left_s": 2.0}
        )
    )
    assert exchange.offers == [("salvage", 6)]
    assert (parts.stopper.phase, parts.files()) == (StopPhase.STOPPING, [])
    parts.gate.end_update()
    assert parts.reach(6)
    with pytest.raises(GracefulExit):
        parts.stopper.at_limit(is_cut=True)
    assert (parts.stopper.phase, parts.files()) == (StopPhase.SAVED, [6])


def test_a_boundary_that_callbacks_are_not_done_with_is_not_saved_yet(parts: Parts) -> None:
    parts.gate.pass_boundary(lambda: parts.collector.copy(Position(step=6, epoch=1, step_in_epoch=6)))
    parts.stopper.hear_signal(signal.SIGTERM)
    assert (parts.stopper.phase, parts.files()) == (StopPhase.STOPPING, [])
    assert parts.reach(6)


@pytest.mark.parametrize("reaches_boundary", [True, False])
def test_the_end_saves_a_boundary_and_nothing_torn(parts: Parts, reaches_boundary: bool) -> None:
    parts.watcher.start()
    parts.stopper.hear_signal(signal.SIGTERM)
    parts.gate.begin_update()
    parts.gate.end_update()
    if reaches_boundary:
        parts.reach(6)
    assert parts.stopper.at_end() is reaches_boundary
    assert parts.stopper.finished is not reaches_boundary
    assert parts.files() == ([6] if reaches_boundary else [])


def raise_save_error(*args: Any, **more: Any) -> Any:
    raise SaveError("injected")


def raise_anything(*args: Any, **more: Any) -> Any:
    raise ZeroDivisionError("injected")


@pytest.mark.parametrize("error", [raise_save_error, raise_anything])
def test_a_save_that_fails_still_leaves(parts: Parts, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    monkeypatch.setattr(parts.saver, "save_dying", error)
    parts.stopper.hear_signal(signal.SIGTERM)
    assert parts.reach(6)
    with pytest.raises(GracefulExit) as caught:
        parts.stopper.at_limit(is_cut=True)
    assert (caught.value.code, caught.value.step, caught.value.path) == (143, None, None)
    assert parts.stopper.phase is StopPhase.FAILED
    assert parts.stopper.failure is not None and "injected" in parts.stopper.failure


def test_the_training_thread_waits_for_a_save_in_progress(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on, order = threading.Event(), threading.Event(), []
    save = parts.saver.save_dying

    def slow(*args: Any, **more: Any) -> Any:
        started.set()
        assert go_on.wait(30)
        order.append("saved")
        return save(*args, **more)

    monkeypatch.setattr(parts.saver, "save_dying", slow)
    parts.steps.leave_step()
    watcher = threading.Thread(target=parts.stopper.hear_signal, args=(signal.SIGTERM,))
    watcher.start()
    assert started.wait(30)

    def arrive() -> None:
        with pytest.raises(GracefulExit):
            parts.stopper.at_limit(is_cut=True)
        order.append("left")

    training = threading.Thread(target=arrive)
    training.start()
    go_on.set()
    watcher.join(30)
    training.join(30)
    assert order == ["saved", "left"] and parts.files() == [5]


def test_a_step_that_is_durable_already_is_not_written_again(parts: Parts) -> None:
    parts.durable = parts.directory / "old.safetensors"
    parts.steps.leave_step()
    parts.stopper.hear_signal(signal.SIGTERM)
    assert (parts.stopper.path, parts.stopper.saved_step, parts.files()) == (parts.durable, 5, [])


@pytest.mark.parametrize(
    ("content", "code"), [({"kind": "signal", "exit_code": 143}, 143), ({"kind": "exception", "exit_code": 1}, 75)]
)
def test_a_peers_alarm_keeps_its_deadline_and_says_where_it_came_from(
    parts: Parts, content: dict[str, Any], code: int
) -> None:
    request = {"reason": "SIGTERM", "origin": 3, "signum": 15, "grace_left_s": 4.0, **content}
    parts.stopper.hear(parts.stopper.alarms.of_peer(request))
    alarm = parts.stopper.alarm
    assert alarm is not None
    assert (alarm.reason, alarm.origin, alarm.exit_code) == ("SIGTERM on rank 3", 3, code)
    assert 3 < alarm.deadline.remaining_s() <= 4


def test_a_peer_never_gives_more_time_than_this_rank_has(make_parts: Make) -> None:
    parts = make_parts(grace_s=2.0)
    parts.stopper.hear(
        parts.stopper.alarms.of_peer(
            {"kind": "flag", "reason": "x", "exit_code": 75, "origin": 1, "grace_left_s": 900.0}
        )
    )
    assert parts.stopper.alarm is not None and parts.stopper.alarm.deadline.remaining_s() <= 2


def test_what_comes_after_the_save_gets_the_deadline_and_may_fail(
    make_parts: Make, caplog: pytest.LogCaptureFixture
) -> None:
    deadlines: list[float] = []

    def export(at: float) -> None:
        deadlines.append(at)
        raise RuntimeError("injected")

    parts = make_parts(after_save=export)
    parts.stopper.after_save()
    assert deadlines == [], "nothing was saved yet"
    parts.steps.leave_step()
    parts.stopper.hear_signal(signal.SIGTERM)
    parts.stopper.after_save()
    assert parts.stopper.alarm is not None and deadlines == [parts.stopper.alarm.deadline.at]
    assert "after the checkpoint: RuntimeError: injected" in caplog.text


def test_exit_codes_of_a_policy_replace_the_defaults(make_parts: Make) -> None:
    heard = make_parts(exit_codes={"signal": 9})
    heard.stopper.hear_signal(signal.SIGTERM)
    assert heard.stopper.exit().code == 9
    flagged = make_parts(exit_codes={"signal": 9})
    flagged.stopper.hear(flagged.stopper.alarms.of_flag(Path("flag")))
    assert flagged.stopper.exit().code == 75


@pytest.mark.parametrize(("before", "after"), list(itertools.product(StopPhase, StopPhase)))
def test_only_the_moves_of_the_table_are_possible(parts: Parts, before: StopPhase, after: StopPhase) -> None:
    parts.stopper._phase = before
    if after in MOVES[before]:
        parts.stopper._move(after)
        assert parts.stopper.phase is after
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {before.name} to {after.name}"):
            parts.stopper._move(after)


# --- the last resort ---


class StuckExchange(LocalExchange):
    """Another rank's answer that does not come."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def announce(self, name: str, offer: Offer) -> None:
        self.asked.set()
        assert self.go.wait(60)


def test_a_claim_is_taken_from_a_thread_that_is_stuck_before_it_writes(parts: Parts) -> None:
    stuck = parts.stopper.exchange = StuckExchange()
    parts.steps.leave_step()  # so that the watcher saves at once
    watcher = threading.Thread(target=lambda: parts.stopper.hear_signal(signal.SIGTERM))
    watcher.start()
    assert stuck.asked.wait(60) and parts.stopper.phase is StopPhase.SAVING
    alarm = parts.stopper.alarm
    assert alarm is not None
    wait_until(lambda: parts.stopper.is_stuck(0.01), "the claim is seen to be stuck")
    parts.stopper.save_as_last_resort(alarm)
    assert (parts.stopper.phase, parts.files()) == (StopPhase.SAVED, [5])
    stuck.go.set()
    watcher.join(60)
    assert (parts.stopper.phase, parts.files()) == (StopPhase.SAVED, [5])
    assert len(events(parts.directory, "save")) == 1, "whoever lost the claim writes nothing"


def test_a_file_that_is_being_written_is_left_to_its_writer(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go = threading.Event(), threading.Event()
    save = parts.saver.save_dying

    def slow(*args: Any, **kwargs: Any) -> Any:
        writing.set()
        assert go.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(parts.saver, "save_dying", slow)
    parts.steps.leave_step()
    watcher = threading.Thread(target=lambda: parts.stopper.hear_signal(signal.SIGTERM))
    watcher.start()
    assert writing.wait(60)
    alarm = parts.stopper.alarm
    assert alarm is not None and not parts.stopper.is_stuck(0.0)
    parts.stopper.save_as_last_resort(alarm)
    assert parts.stopper.phase is StopPhase.SAVING
    go.set()
    watcher.join(60)
    assert (parts.stopper.phase, parts.files()) == (StopPhase.SAVED, [5])


def test_the_last_resort_refuses_what_is_no_boundary(parts: Parts) -> None:
    parts.stopper.hear_signal(signal.SIGTERM)
    parts.gate.begin_update()
    alarm = parts.stopper.alarm
    assert alarm is not None
    parts.stopper.save_as_last_resort(alarm)
    assert (parts.stopper.phase, parts.files()) == (StopPhase.FAILED, [])
    assert parts.stopper.failure == "an optimizer.step() was in progress or failed half-way"


REQUEST = {"kind": "request", "reason": "enough", "exit_code": 0, "origin": 1, "signum": None, "grace_left_s": 30.0}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 75),  # never as if the training had finished
        ({"exit_code": 9}, 9),
        ({"kind": "signal", "signum": 15, "exit_code": 0}, 143),
        ({"kind": "signal", "exit_code": 0}, 75),
        ({"kind": "flag", "exit_code": 143}, 0),  # this rank's own policy says so
        ({"kind": "fault", "exit_code": 0}, 75),
        ({"kind": "peer", "exit_code": 0}, 75),
        ({"kind": "exception", "exit_code": 0}, 75),
    ],
)
def test_how_to_leave_is_not_for_a_stranger_to_say(make_parts: Make, change: dict[str, Any], code: int) -> None:
    alarms = make_parts(exit_codes={"flag": 0}).stopper.alarms
    assert alarms.of_peer({**REQUEST, **change}).exit_code == code


def test_another_rank_that_is_known_may_say_how_to_leave(parts: Parts) -> None:
    assert parts.stopper.alarms.of_peer(REQUEST, trusted=True).exit_code == 0
    assert parts.stopper.alarms.of_peer({**REQUEST, "kind": "exception"}, trusted=True).exit_code == 75


@pytest.mark.parametrize("left_s", [-5.0, 0.0, 0.1])
def test_a_stranger_cannot_take_the_time_to_save(parts: Parts, left_s: float) -> None:
    assert parts.stopper.alarms.of_peer({**REQUEST, "grace_left_s": left_s}).deadline.remaining_s() > 2
    assert parts.stopper.alarms.of_peer({**REQUEST, "grace_left_s": left_s}, trusted=True).deadline.grace_s == 0.5


def test_a_reason_is_shown_not_obeyed(parts: Parts) -> None:
    alarms = parts.stopper.alarms
    foreign = "\x1b[31mred\r\nline"
    for alarm in (
        alarms.of_request(foreign, 0),
        alarms.of_fault(foreign),
        alarms.of_exception(ValueError(foreign)),
        alarms.of_agent({"kind": "peer", "reason": foreign}),
    ):
        assert alarm.reason.isprintable() and "red" in alarm.reason


@pytest.mark.parametrize(
    "content", [{"exit_code": "x"}, {"exit_code": -1}, {"grace_s": "x"}, {"grace_s": float("nan")}]
)
def test_an_order_without_sense_still_stops(parts: Parts, content: dict[str, Any]) -> None:
    alarm = parts.stopper.alarms.of_agent({"kind": "fault", "reason": "x", **content})
    assert (alarm.exit_code, alarm.deadline.grace_s) == (75, 30.0)
