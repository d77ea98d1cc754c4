"""``mindx-elastic msrun``: starts the scheduler and this machine's workers of a dynamic cluster, with msrun's options.

Each process gets the variables of the cluster, and its output goes to a file: ``worker_{i}.log`` and ``scheduler.log``
in ``--log_dir``. With ``--join=True`` the command waits for the job and returns its outcome; else it returns at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mindx_elastic.agreement.hosting import ask_again_soon
from mindx_elastic.alarm.exit_codes import exit_code_of_signal
from mindx_elastic.cluster.messages import MAX_WORKERS
from mindx_elastic.cluster.scheduler import is_own_address
from mindx_elastic.core.posix import answered_by
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import UsageError

__all__ = ["MsrunProcess", "Plan", "main", "plan_of"]

_IGNORED = ("bind_core", "sim_level", "sim_rank_id", "rank_table_file", "tail_worker_log", "worker_log_name")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S = 0.1
_LONELY_S = 10.0  # a worker that was started at once may take so long to hear of the scheduler's end


@dataclass(frozen=True, kw_only=True)
class MsrunProcess:
    """One that is to be started."""

    name: str
    log: Path
    env: Mapping[str, str]
    """What is added to this command's environment."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one call starts."""

    command: tuple[str, ...]
    processes: tuple[MsrunProcess, ...]
    """The scheduler, if it is among them, comes first."""
    joins: bool
    notes: tuple[str, ...] = ()
    """What is said of options without effect."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (mindx-elastic msrun --help)")


def _switch(text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def _from_1_to(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not 0 < int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {most}")
        return int(text)

    return number


def _make_parser() -> _Parser:
    """msrun's options, each also with dashes."""
    parser = _Parser(prog="mindx-elastic msrun", allow_abbrev=False)

    def add(name: str, **more: Any) -> None:
        names = [f"--{name}"] + [f"--{name.replace('_', '-')}"] * ("_" in name)
        if more["default"] is not None:
            more["help"] += f" (default: {more['default']})"
        parser.add_argument(*names, **more)

    add("worker_num", type=_from_1_to(MAX_WORKERS), default=8, metavar="N", help="workers of the job")
    here = "workers that are started on this machine"
    add("local_worker_num", type=_from_1_to(MAX_WORKERS), default=8, metavar="N", help=here)
    add("master_addr", default="127.0.0.1", metavar="HOST", help="where the scheduler listens")
    add("master_port", type=_from_1_to(65535), default=8118, metavar="PORT", help="its port")
    add("node_rank", type=int, default=-1, metavar="N", help="number of this machine, from 0; with several machines")
    add("log_dir", type=Path, default=Path("."), metavar="DIR", help="for worker_{i}.log and scheduler.log")
    add("join", type=_switch, default=False, metavar="BOOL", help="wait for the job, and return its outcome")
    waits = "how long all workers may take to be there"
    add("cluster_time_out", type=_from_1_to(7 * 86400), default=600, metavar="S", help=waits)
    for name in _IGNORED:
        add(name, default=None, metavar="X", help="accepted, without effect")
    parser.add_argument("task_script", metavar="SCRIPT", help="the program: train.py, or python train.py")
    parser.add_argument("task_script_args", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="for the program")
    return parser


def plan_of(arguments: Sequence[str], *, about: str = "") -> Plan:
    """What the command line asks for. Prints `about` and the options and leaves for ``--help``. Raises UsageError."""
    parser = _make_parser()
    parser.description, parser.formatter_class = about, argparse.RawDescriptionHelpFormatter
    args = parser.parse_args(list(arguments))
    if args.local_worker_num > args.worker_num:
        raise UsageError(
            f"--local_worker_num={args.local_worker_num} is more than --worker_num={args.worker_num}; give both"
        )
    is_whole = args.local_worker_num == args.worker_num
    first = 0 if is_whole else args.node_rank * args.local_worker_num
    if args.node_rank >= 0 and not is_whole and first + args.local_worker_num > args.worker_num:
        raise UsageError(
            f"--node_rank={args.node_rank} with --local_worker_num={args.local_worker_num} begins at rank {first}, "
            f"which does not fit into --worker_num={args.worker_num}"
        )
    common = {
        "MS_WORKER_NUM": str(args.worker_num),
        "MS_SCHED_HOST": args.master_addr,
        "MS_SCHED_PORT": str(args.master_port),
        "MS_TOPO_TIMEOUT": str(args.cluster_time_out),
    }
    processes = []
    if args.node_rank == 0 or (args.node_rank < 0 and (is_whole or is_own_address(args.master_addr))):
        env = {**common, "MS_ROLE": "MS_SCHED", "MS_NODE_ID": "sched"}
        processes.append(MsrunProcess(name="scheduler", log=args.log_dir / "scheduler.log", env=env))
    is_named = is_whole or args.node_rank >= 0
    for number in range(args.local_worker_num):
        rank = first + number if is_named else number
        env = {**common, "MS_ROLE": "MS_WORKER", "DEVICE_ID": str(number), "MS_NODE_ID": str(rank) if is_named else ""}
        processes.append(MsrunProcess(name=f"worker_{rank}", log=args.log_dir / f"worker_{rank}.log", env=env))
    return Plan(
        command=_command(args.task_script, args.task_script_args),
        processes=tuple(processes),
        joins=args.join,
        notes=tuple(f"--{name} has no effect here" for name in _IGNORED if getattr(args, name) is not None),
    )


def _command(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    if script.endswith(".py"):
        return (sys.executable, script, *arguments)
    return (script, *arguments)


def main(arguments: Sequence[str], *, about: str = "") -> int:
    """Start what the command line asks for; returns the exit code. Main thread. about: see `plan_of`."""
    plan = plan_of(arguments, about=about)
    if plan.command[0] == sys.executable and not Path(plan.command[1]).exists():
        # Without --join nothing else tells it: each process says so in its own log.
        raise UsageError(f"{plan.command[1]}: no such file")
    for note in plan.notes:
        _say(note)
    job = _Job(plan)
    with answered_by(job.note_signal, _SIGNALS):
        job.start()
        return job.join() if plan.joins or job.is_told_to_stop else 0


class _Job:
    """The started processes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._codes: dict[str, int] = {}
        self._recovers = os.environ.get("MS_ENABLE_RECOVERY", "").strip() == "1"
        self._signal, self._stopped = 0, False

    @property
    def is_told_to_stop(self) -> bool:
        return bool(self._signal)

    def start(self) -> None:
        """Raises UsageError."""
        ask_again_soon()
        try:
            for each in self._plan.processes:
                self._start(each)
        except OSError as error:
            for process in self._running.values():
                process.kill()
                process.wait()
            raise UsageError(f"{self._plan.command[0]} cannot be started: {error}") from error

    def _start(self, each: MsrunProcess) -> None:
        each.log.parent.mkdir(parents=True, exist_ok=True)
        with open(each.log, "ab" if self._recovers else "wb") as log:
            self._running[each.name] = subprocess.Popen(
                self._plan.command,
                env={**os.environ, **each.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _say(f"{each.name}: pid {self._running[each.name].pid}, output in {each.log}")

    def join(self) -> int:
        """Wait for the job; returns its outcome: the scheduler's, or on another machine that of the workers here."""
        alone_since = 0.0
        while self._running:
            self._collect()
            if number := self._signal:
                self._signal, self._stopped = 0, True
                self._send(number, [name for name in self._running if name != "scheduler"])
            if self._waits_in_vain():
                alone_since = alone_since or time.monotonic()
                if time.monotonic() > alone_since + _LONELY_S:
                    self._send(signal.SIGTERM, self._running)
                    alone_since = float("inf")
            time.sleep(_LOOK_S)
        if "scheduler" in self._codes:
            return self._codes["scheduler"]
        return next((code for code in self._codes.values() if code), 0)

    def _waits_in_vain(self) -> bool:
        """Whether those that run would wait for a scheduler that does not come; or the scheduler for workers that have
        ended as they were told to, before it knew them, say."""
        if "scheduler" in self._codes:  # unless it was ended for somebody to start it again, while the job goes on
            return not (self._recovers and self._codes["scheduler"] > 128)
        return self._stopped and list(self._running) == ["scheduler"]

    def _collect(self) -> None:
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[name]
            self._codes[name] = exit_code_of_signal(-code) if code < 0 else code
            if code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
                _say(f"{name} {how}")

    def note_signal(self, signum: int, frame: FrameType | None) -> None:
        # A terminal that is gone stops the job as SIGTERM does: SIGHUP would end the workers without a save.
        self._signal = signal.SIGTERM if signum == signal.SIGHUP else signum

    def _send(self, signum: int, names: Iterable[str]) -> None:
        """Workers save and leave, and the scheduler ends with them."""
        for name in names:
            self._running[name].send_signal(signum)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # a closed stderr must not stop the job
        print(f"mindx-elastic msrun: {printable(text)}", file=sys.stderr, flush=True)
