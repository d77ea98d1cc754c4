"""Puts defects back, one at a time: after how many schedules does the simulation find each?

    python -m tests.simulation.mutants [--most 20000] [--only cluster]

Each is a change of a few lines that a good engineer could make, and most of them were made here once. The table names
after how many schedules it shows, and what is wrong then. Exit code 1: one was not found.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_AT_ONCE = 100


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file`, below the package."""

    what: str
    file: str
    old: str
    new: str
    simulation: str = "stops"
    """The module of `tests.simulation` that is to find it."""


MUTANTS = (
    Mutant(
        "an alarm that comes while all ranks finish is answered by one of them",
        "guard/stopper.py",
        "            if decision == FINISHED:\n                self.dismiss()",
        "            if False:\n                self.dismiss()",
    ),
    Mutant(
        "the ranks stop at the step of the slowest one",
        "agreement/stop_step.py",
        "return Decision(max(offer.step if",
        "return Decision(min(offer.step if",
    ),
    Mutant(
        "a rank obeys its own proposal, not the cell",
        "agreement/store_exchange.py",
        'return found or Decision(None, f"a stranger',
        'return proposal or Decision(None, f"a stranger',
    ),
    Mutant(
        "the other ranks are not told of the stop",
        "agreement/store_exchange.py",
        'self._store.multi_set([f"bell/{r}" for r in ranks], ["1" for _ in ranks])',
        "pass",
    ),
    Mutant(
        "a state in mid-update is saved",
        "capture/update_gate.py",
        '            return "an optimizer.step() was in progress or failed half-way"',
        "            return None",
    ),
    Mutant(
        "an update does not wait for the file that is being written",
        "capture/update_gate.py",
        "            if self._readers:\n                self._wait_for_readers()\n            self._running += 1\n"
        "            self.state = self._before = GateState.UPDATING",
        "            self._running += 1\n            self.state = self._before = GateState.UPDATING",
    ),
    Mutant(
        "nobody ends a process whose training hangs",
        "guard/last_resort.py",
        "        stopper.leave_behind(alarm, self._why_leave",
        "        return None and (alarm, self._why_leave",
    ),
    Mutant(
        "a pause outlives a stop",
        "agreement/step_gate.py",
        "lambda: not self._paused or self._step < self._limit)",
        "lambda: self._step < self._limit)",
    ),
    Mutant(
        "a heartbeat is not noted",
        "cluster/table.py",
        "        self._patience[incarnation] = _Patience(place, now + self.limits.heartbeat_s)\n        return True",
        "        return True",
        "cluster",
    ),
    Mutant(
        "the next group has the generation of the one before",
        "cluster/table.py",
        "_Formed(self.generation + 1, ",
        "_Formed(max(0, self.generation), ",
        "cluster",
    ),
    Mutant(
        "workers are told before the table is written",
        "cluster/scheduler.py",
        "        if self._write() and table.outbox:\n",
        "        if (self._write() or True) and table.outbox:\n",
        "cluster",
    ),
    Mutant(
        "the others are not told of a death",
        "cluster/table.py",
        "                    self.outbox.append((place.incarnation, news))",
        "                    pass",
        "cluster",
    ),
    Mutant(
        "a farewell is not waited for",
        "cluster/connection.py",
        "            self._leaves_at = now\n",
        "            self._understood()\n",
        "cluster",
    ),
    Mutant(
        "a farewell is answered before the table is written",
        "cluster/scheduler.py",
        "                self.table.leave(name, message, now)",
        "                self.table.leave(name, message, now) or self.send(connection, messages.Noted())",
        "cluster",
    ),
    Mutant(
        "a rank that dies while the process group is started is waited for",
        "cluster/worker_end.py",
        "if not report_death(rank) and self._is_joining:",
        "if not report_death(rank) and False:",
        "cluster",
    ),
    Mutant(
        "a worker connects again after a second, when it is held for dead",
        "cluster/connection.py",
        "_MOST_PAUSE_S = 0.4",
        "_MOST_PAUSE_S = 1.5",
        "cluster",
    ),
    Mutant(
        "a scheduler that was held up holds the workers for dead",
        "cluster/scheduler.py",
        "        self.table.forgive(now - self._listened_at - _TURN_S)",
        "        pass",
        "cluster",
    ),
    Mutant(
        "a worker that waits for its admission says nothing",
        "cluster/connection.py",
        "            line.send(messages.Beat())",
        "            if self.job:\n                line.send(messages.Beat())",
        "cluster",
    ),
    Mutant(
        "a second process takes the place of a living one",
        "cluster/table.py",
        "            return self._patience[place.incarnation].until",
        "            return 0.0",
        "cluster",
    ),
    Mutant(
        "a process that is in a group already is in the next one, too",
        "cluster/table.py",
        "            self._move(place, ProcessState.TRAINING)\n",
        "",
        "cluster",
    ),
    Mutant(
        "a new process gets any free rank",
        "cluster/table.py",
        "        self._number(waiting)\n",
        "        for rank, place in enumerate(sorted(waiting, key=lambda m: m.incarnation)):\n"
        "            place.rank = rank\n",
        "cluster",
    ),
    Mutant(
        "a job is finished though a rank was lost",
        "cluster/table.py",
        "if states <= {ProcessState.DONE, ProcessState.ENDED}:",
        "if ProcessState.DONE in states:",
        "cluster",
    ),
    Mutant(
        "a killed agent stops the other nodes",
        "agent/endings.py",
        "|a node is lost|the agent .*is gone)",
        "|a node is lost)",
        "agents",
    ),
    Mutant(
        "all nodes count their own restarts",
        "agent/supervisor.py",
        "max(0, spec.max_restarts - group.restarts)",
        "self._remaining_restarts",
        "agents",
    ),
    Mutant(
        "restarts are without end",
        "agent/restarts.py",
        "        if len(self._times) >= self.most:\n",
        "        if False:\n",
        "agents",
    ),
    Mutant(
        "an agent hears no signal while its workers run",
        "agent/attempt.py",
        "        for signum in inbox.heard[self._num_heard :]:",
        "        for signum in inbox.heard[len(inbox.heard) :]:",
        "agents",
    ),
    Mutant(
        "a rank that does not answer is not killed",
        "agent/attempt.py",
        "        self._after(self._grace_s, self._kill_all)\n",
        "",
        "agents",
    ),
    Mutant(
        "a failure is not started again",
        "agent/attempt.py",
        "        self.stop, self._cause, self._cause_rank = StopKind.FAILURE, cause, rank",
        "        self.stop, self._cause, self._cause_rank = StopKind.FAULT, cause, rank",
        "agents",
    ),
    Mutant(
        "a connection that is reset is not opened again",
        "agent/nodes.py",
        "        return not self.closed.is_set()\n",
        "        return False\n",
        "agents",
    ),
    Mutant(
        "a node that comes back ends the others",
        "agent/supervisor.py",
        '        if ending.outcome in ("membership", "rehearsed"):',
        '        if ending.outcome == "rehearsed":',
        "agents",
    ),
    Mutant(
        "a rank that hangs is waited for",
        "agent/attempt.py",
        "            self._hear_hang(stuck, statuses)",
        "            pass",
        "agents",
    ),
    Mutant(
        "a job has finished when one of its ranks has",
        "agent/endings.py",
        "    if all(m is Meaning.FINISHED for m in meanings):",
        "    if any(m is Meaning.FINISHED for m in meanings):",
        "agents",
    ),
    Mutant(
        "an agent that is told to stop at its end takes the store with it",
        "agent/nodes.py",
        "                    until = min(until, now + _HURRY_S)",
        "                    break",
        "agents",
    ),
    Mutant(
        "nodes that finish do not wait for the others",
        "agent/supervisor.py",
        '            if self.ending.outcome == "finished" and membership is not None:',
        "            if False:",
        "agents",
    ),
    Mutant(
        "who is cut off in an update counts as whole",
        "rejoin/protocol.py",
        "clean = [report for report in alive if report.clean]",
        "clean = list(alive)",
        "in_place",
    ),
    Mutant(
        "all go on from the step of the slowest survivor",
        "rejoin/protocol.py",
        "    step = max(report.step for report in clean)\n",
        "    step = min(report.step for report in clean)\n",
        "in_place",
    ),
    Mutant(
        "a recovery is told of twice",
        "agent/recovery.py",
        "        now.told = True\n        machine",
        "        machine",
        "in_place",
    ),
    Mutant(
        "the record names the ranks that were dead at first",
        "agent/recovery.py",
        "            ranks=verdict.dead,\n",
        "            ranks=tuple(sorted(machine.dead))[:1],\n",
        "in_place",
    ),
    Mutant(
        "a boundary follows from a failed collective, where the program goes on",
        "rejoin/member.py",
        "        if self._must_leave():\n            raise LeavesToRejoin\n        if self._failures",
        "        if self._failures",
        "in_place",
    ),
    Mutant(
        "the same, while the job stops",
        "rejoin/member.py",
        "(self.comes_out_soon() or host.is_stopping())",
        "self.comes_out_soon()",
        "in_place",
    ),
)


def _schedules_until_found(root: Path, simulation: str, most: int) -> tuple[int, str]:
    """How many schedules it took, and what was found; 0: nothing."""
    for first in range(0, most, _AT_ONCE):
        arguments = ["--schedules", str(_AT_ONCE), "--first", str(first)]
        command = [sys.executable, "-m", f"tests.simulation.{simulation}", *arguments]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        found = sorted(
            (int(line.split()[1].rstrip(":")), line) for line in done.stdout.splitlines() if line.startswith("seed ")
        )
        if found:
            return found[0][0] + 1, found[0][1].partition(": ")[2]
        if done.returncode:
            return first + 1, done.stderr.strip().splitlines()[-1]
    return 0, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=20_000, help="schedules for each")
    parser.add_argument("--only", default="", help="those of this simulation: stops, cluster, agents, in_place")
    options = parser.parse_args()
    most = options.most
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("mindx_elastic", "tests/simulation"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        (root / "tests/__init__.py").touch()
        for mutant in (each for each in MUTANTS if options.only in ("", each.simulation)):
            path = root / "mindx_elastic" / mutant.file
            text = path.read_text()
            if text.count(mutant.old) != 1:
                print(f"| {mutant.what} | its lines are not in {mutant.file} any more | |", flush=True)
                missed += 1
                continue
            path.write_text(text.replace(mutant.old, mutant.new))
            took, found = _schedules_until_found(root, mutant.simulation, most)
            path.write_text(text)
            missed += not took
            print(f"| {mutant.what} | {took or 'not found'} | {found[:120]} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
