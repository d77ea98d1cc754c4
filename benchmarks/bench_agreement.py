"""Seconds, and messages to the store, until all ranks of a job know the step at which they stop.

    python benchmarks/bench_agreement.py [--ranks 256 1024 4096] [--alarms all one] [--real 64] [--rounds 7]

One real TCPStore, in a process of its own, serves all ranks. `--real` of them are whole: each is a `StoreExchange` of
its own with three connections, its listener and its threads, and a thread that does what a guard's watcher does at a
stop: ask (where it has heard the alarm), make an offer, wait for the decision. In a real job each rank has an
interpreter and processors of its own. Here they share one interpreter, and thousands of threads take most of the time
to pass it on; the package's own code takes 19 us a rank. So the other ranks are stand-ins: on three connections each
they send byte for byte what a whole rank sends, each message when the answer to the one before has come. It is recorded
from a whole rank when the benchmark begins. One loop without threads serves them all.

- `all`: a launcher signals all ranks at once.
- `one`: one rank hears the alarm; its request wakes the listeners of the others.

`seconds`: from the alarm to the moment at which the last rank has the decision. `whole ranks`: the last of these only.
`server cpu`, `ranks cpu`: CPU seconds of the store's process and of all processes with ranks. `messages`: the most that
one whole rank has sent after the alarm, its listener's included; `per rank`: the mean. All ranks must agree, or the run
fails.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import queue
import select
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a line for each connection whose name is not found

import torch.distributed as dist

import harness
from mindx_elastic.agreement import store_exchange
from mindx_elastic.agreement.hosting import ask_again_soon, host_store
from mindx_elastic.agreement.store_exchange import StoreExchange
from mindx_elastic.alarm.alarm import StopRequest

ALARMS = ("all", "one")
TARGET_S, TARGET_MESSAGES = 1.0, 8
FIRST_RECORD = 900_000
ROUND, ASKED = "round {:06}", "SIGTERM {:06}"  # of one length, so that one can stand for another in a record
CONNECTIONS, BELL = 3, 1  # of a rank, and the one that its listener uses
PATIENCE_S = 600.0  # for the offers of all ranks: the benchmark measures how long it takes, and does not cut it off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--alarms", nargs="+", choices=ALARMS, default=list(ALARMS))
    parser.add_argument("--real", type=int, default=64, help="ranks that are whole (default 64), not stand-ins")
    parser.add_argument("--processes", type=int, default=1, help="that the whole ranks share (default 1)")
    harness.add_arguments(parser)
    args = parser.parse_args()
    ask_again_soon()
    store_exchange._ANSWER_S = PATIENCE_S  # a rank that gave a slow store up would let all others wait for its offer
    report = harness.Report(args)
    for world_size in args.ranks:
        with Job(world_size, min(world_size, max(1, args.real)), args.processes) as job:
            methods: dict[str, harness.Method] = {alarm: partial(job.stop, alarm) for alarm in args.alarms}
            compared = harness.compare(f"{world_size} ranks", methods, rounds=args.rounds, warm_up=1)
        limits = [harness.Target(method=alarm, at_most=TARGET_S) for alarm in args.alarms]
        limits += [harness.Target(method=alarm, figure="per rank", at_most=TARGET_MESSAGES) for alarm in args.alarms]
        report.add(compared, targets=limits)
    return report.end()


class Job:
    """The store's process, and those of the simulated ranks. All are forked, so that torch is imported once."""

    def __init__(self, world_size: int, num_whole: int, num_processes: int) -> None:
        self.world_size = world_size
        self._stack = ExitStack()
        try:
            self.server = self._start(serve)
            port = self.server.recv()
            bounds = [num_whole * number // num_processes for number in range(num_processes + 1)]
            self.workers = [
                self._start(simulate, world_size, first, end, port) for first, end in pairwise(bounds) if first < end
            ]
            if num_whole < world_size:
                self.workers.append(self._start(stand_in, world_size, num_whole, world_size, port))
            self.num_rounds = 0
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, work: Callable[..., None], *arguments: Any) -> Connection:
        """Raises EOFError from `recv` once the process has ended."""
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=work, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._stack.callback(process.join)
        self._stack.callback(process.kill)
        return ours

    def _server_cpu_s(self) -> float:
        self.server.send("cpu")
        return float(self.server.recv())

    def stop(self, alarm: str) -> dict[str, float]:
        """One stop of all ranks."""
        self.num_rounds += 1
        for worker in self.workers:
            worker.send(ROUND.format(self.num_rounds))
        for worker in self.workers:
            assert worker.recv() == "ready"
        server_s = self._server_cpu_s()
        began = time.monotonic()
        for number, worker in enumerate(self.workers):
            worker.send(alarm if alarm == "all" or number == 0 else "none")
        told = [worker.recv() for worker in self.workers]
        ends = sorted(end - began for each in told for end in each["ends"])
        steps = {step for each in told for step in each["steps"]}
        if len(ends) != self.world_size or steps != {4}:
            raise RuntimeError(
                f"{self.world_size} ranks have not agreed on step 4; the decisions of {len(ends)}: {steps}"
            )
        messages = [count for each in told for count in each["messages"]]
        whole = [end - began for each in told if each["messages"] for end in each["ends"]]
        return {
            harness.SECONDS: ends[-1],
            "whole ranks": max(whole),
            "median rank": statistics.median(ends),
            "server cpu": self._server_cpu_s() - server_s,
            "ranks cpu": sum(each["cpu"] for each in told),
            "messages": max(messages),
            "per rank": statistics.mean(messages),
        }


def serve(pipe: Connection) -> None:
    """The store's process. Each question is answered with its CPU time."""
    store = host_store("127.0.0.1", timeout=timedelta(seconds=30))
    pipe.send(store.port)
    while True:
        pipe.recv()
        pipe.send(time.process_time())


class Counted:
    """A connection that counts its messages."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.num_messages = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.num_messages += 1
            return call(*arguments)

        return counted


def request_of(rank: int) -> StopRequest:
    """Of the same length for each rank."""
    reason = ASKED.format(rank)
    return StopRequest(kind="signal", reason=reason, origin=0, exit_code=143, signum=15, grace_left_s=30.0)


def offer_of(rank: int) -> int:
    return rank % 5


class Rank:
    """One simulated rank of one round."""

    def __init__(self, rank: int, world_size: int, prefix: str, stores: Sequence[Any]) -> None:
        self.rank = rank
        self.connections = [Counted(dist.PrefixStore(prefix, store)) for store in stores]
        unused = iter(self.connections)
        self.exchange = StoreExchange(lambda: next(unused), rank=rank, world_size=world_size)
        self.alarms: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.ended = 0.0
        self.step: int | None = None
        self.exchange.listen(lambda content: self.alarms.put(False))
        self.watcher = threading.Thread(target=self._watch)
        self.watcher.start()

    @property
    def num_messages(self) -> int:
        return sum(connection.num_messages for connection in self.connections)

    def _watch(self) -> None:
        if self.alarms.get():
            self.exchange.request(request_of(self.rank))
        decision = self.exchange.decide("stop", offer_of(self.rank), PATIENCE_S)
        self.ended, self.step = time.monotonic(), decision.step


def simulate(pipe: Connection, world_size: int, first: int, end: int, port: int) -> None:
    """Some of the ranks. Is told what to do: a round's name, and then the alarm."""
    threading.stack_size(256 << 10)
    # Each thread that waits for the interpreter wakes up so often; hundreds of them would do nothing else. None of them
    # computes for long, and each lets go when it waits for the store.
    sys.setswitchinterval(2.0)
    base: Any = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    # At once: each looks up the name of its other end, which takes a second where a name server loses the answer.
    with ThreadPoolExecutor(32) as pool:
        opened = list(pool.map(lambda _: base.clone(), range(CONNECTIONS * (end - first))))
    while True:
        prefix = pipe.recv()
        own = [opened[CONNECTIONS * number :][:CONNECTIONS] for number in range(end - first)]
        ranks = [Rank(rank, world_size, prefix, stores) for rank, stores in zip(range(first, end), own, strict=True)]
        before = [rank.num_messages for rank in ranks]
        pipe.send("ready")
        alarm, cpu_s = pipe.recv(), time.process_time()
        for rank in {"all": ranks, "one": ranks[:1], "none": []}[alarm]:
            rank.alarms.put(True)
        for rank in ranks:
            rank.watcher.join()
        cpu_s = time.process_time() - cpu_s
        for rank in ranks:
            rank.exchange.close()
        told = {
            "ends": [rank.ended for rank in ranks],
            "steps": [rank.step for rank in ranks],
            "messages": [rank.num_messages - start for rank, start in zip(ranks, before, strict=True)],
            "cpu": cpu_s,
        }
        pipe.send(told)


# --- stand-ins ---


class Recorder:
    """A way to the store that writes down what goes over it."""

    def __init__(self, port: int) -> None:
        self._store_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.log: list[tuple[int, bool, bytes]] = []
        """Connection, whether the rank has sent it, and what."""
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            far = socket.create_connection(("127.0.0.1", self._store_port))
            self._ends += [near, far]
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pass_on, args=(number, True, near, far), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(number, False, far, near), daemon=True).start()

    def _pass_on(self, number: int, is_sent: bool, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.log.append((number, is_sent, data))
                target.sendall(data)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60.0
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError("the recorded rank does not do what was expected")
            time.sleep(0.001)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._ends):
            end.close()


@dataclass
class Step:
    """A message, or two without an answer between them, and the bytes that are waited for behind it."""

    connection: int
    sent: bytes
    answer: bytes = b""

    def of(self, record: Record, rank: int, name: str) -> Step:
        """As another rank takes it in another round."""
        sent = self.sent.replace(record.name.encode(), name.encode())
        for make in (_bell, _offer, lambda rank: ASKED.format(rank).encode()):
            sent = sent.replace(make(record.rank), make(rank))
        return Step(self.connection, sent, self.answer)


def _bell(rank: int) -> bytes:
    return f"bell/{rank}".encode()


def _offer(rank: int) -> bytes:
    """The key, the length of the value, and the value."""
    return f"offer/{rank}".encode() + (1).to_bytes(8, sys.byteorder) + str(offer_of(rank)).encode()


@dataclass
class Record:
    """What a whole rank does at a stop."""

    rank: int
    name: str
    """Of the round."""
    openings: list[list[Step]]
    """Of each connection."""
    listener: list[Step]
    """The first one waits for the bell."""
    watcher: list[Step]
    """The last answer is the decision."""


def record(port: int, world_size: int, rank: int, alarm: str, number: int) -> Record:
    """From `rank` in a job in which all others but rank 0 have made their offers."""
    name, recorder = ROUND.format(FIRST_RECORD + number), Recorder(port)
    patience = timedelta(seconds=30)
    straight: Any = dist.TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
    base: Any = dist.TCPStore("127.0.0.1", recorder.port, None, False, patience, wait_for_workers=False)
    before = len(recorder.log)
    stores = [base.clone() for _ in range(CONNECTIONS)]
    opened = recorder.log[before:]
    numbers = sorted({connection for connection, _, _ in opened})
    shared: Any = dist.PrefixStore(name, straight)
    others = [each for each in range(1, world_size) if each != rank]
    shared.multi_set([f"stop/offer/{each}" for each in others], [str(offer_of(each)) for each in others])
    shared.add("stop/count", len(others))
    shared.add("request/others", 1)  # this rank is not the one that rings beside the winner
    clones: Any = (dist.PrefixStore(name, straight.clone()) for _ in range(CONNECTIONS))
    first = StoreExchange(lambda: next(clones), rank=0, world_size=world_size)  # without a listener: it offers last
    before = len(recorder.log)
    recorded = Rank(rank, world_size, name, stores)
    recorder.wait_for(lambda: len(recorder.log) > before)  # its listener waits for the bell
    if alarm == "one":
        first.request(request_of(0))
    else:  # as if the winner had not rung yet
        shared.set("request", request_of(0).encode())
        recorded.alarms.put(True)
    recorder.wait_for(lambda: shared.add("stop/count", 0) == world_size - 1)
    decision = first.decide("stop", offer_of(0), PATIENCE_S)
    recorded.watcher.join()
    if (decision.step, recorded.step) != (4, 4):
        raise RuntimeError(f"the recorded ranks have not agreed on step 4: {decision.step}, {recorded.step}")
    log = [(numbers.index(connection), *what) for connection, *what in recorder.log[before:]]
    found = Record(
        rank,
        name,
        [_steps([(0, *what) for connection, *what in opened if connection == each]) for each in numbers],
        _steps([each for each in log if each[0] == BELL]),
        _steps([each for each in log if each[0] != BELL]),
    )
    for each in (first, recorded.exchange):
        each.close()
    recorder.close()
    return found


def _steps(log: Sequence[tuple[Any, ...]]) -> list[Step]:
    steps: list[Step] = []
    for connection, is_sent, data in log:
        if is_sent and (not steps or steps[-1].answer):
            steps.append(Step(connection, data))
        elif is_sent:
            steps[-1].sent += data
        else:
            steps[-1].answer += data
    return steps


class StandIn:
    """Sends what a whole rank does. Its listener and its watcher, as there, each wait for their own answers."""

    def __init__(self, rank: int, world_size: int, port: int, records: dict[str, Record]) -> None:
        self.rank, self.world_size = rank, world_size
        self.sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for each, steps in zip(self.sockets, records["one"].openings, strict=True):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for step in steps:
                each.sendall(step.sent)
                if step.answer:
                    each.recv(len(step.answer), socket.MSG_WAITALL)
        self._records = records
        self._waits: dict[int, tuple[Step, list[Step]]] = {}
        """By connection: the step whose answer comes, and those behind it."""
        self._got = [b"" for _ in range(CONNECTIONS)]
        self._listener: list[Step] = []
        self._todo: dict[str, list[Step]] = {}
        self._after_bell: list[Step] = []
        self.ended = 0.0
        self.step: int | None = None

    def prepare(self, name: str) -> None:
        records = self._records
        self._todo = {
            alarm: [step.of(each, self.rank, name) for step in each.watcher] for alarm, each in records.items()
        }
        self._listener = [step.of(records["one"], self.rank, name) for step in records["one"].listener]
        self.ended, self.step = 0.0, None

    def listen(self) -> None:
        self._after_bell = self._todo["one"]
        self._go_on(self._listener)

    def hear_alarm(self) -> None:
        self._after_bell = []
        self._go_on(self._todo["all"])

    @property
    def is_done(self) -> bool:
        return self.ended > 0.0 and not self._waits

    def _go_on(self, steps: list[Step]) -> None:
        step, *rest = steps
        self._waits[step.connection] = step, rest
        self.sockets[step.connection].sendall(step.sent)

    def hear(self, connection: int) -> str:
        """An answer has come, or a part of it. Returns what the rank has to do beside its messages."""
        got = self._got[connection] = self._got[connection] + self.sockets[connection].recv(1 << 16)
        step, rest = self._waits[connection]
        if len(got) < len(step.answer):
            return ""
        if len(got) > len(step.answer):
            raise RuntimeError(f"rank {self.rank} has got {got!r}, and the recorded one {step.answer!r}")
        self._got[connection] = b""
        del self._waits[connection]
        if rest:
            self._go_on(rest)
        elif connection != BELL:
            self.ended, self.step = time.monotonic(), 4 if got == step.answer else None
        elif self._after_bell:
            self._go_on(self._after_bell)
        count = int.from_bytes(got, sys.byteorder) if len(got) == 8 else 0
        if b"stop/count" in step.sent:
            return "conclude" if count == self.world_size else ""
        if b"request/others" in step.sent:
            return "ring" if count == 1 else ""
        mine = ASKED.format(self.rank).encode()
        return "ring" if mine in step.sent and mine in got else ""


def stand_in(pipe: Connection, world_size: int, first: int, end: int, port: int) -> None:
    """All ranks from `first` on but `end`, in one loop. As `simulate`."""
    records: dict[int, dict[str, Record]] = {}
    for number, (digits, alarm) in enumerate(itertools.product(range(1, 7), ALARMS)):
        of_length = range(max(first, 10 ** (digits - 1)), min(end, 10**digits))
        if of_length:
            records.setdefault(digits, {})[alarm] = record(port, world_size, of_length[0], alarm, number)
    ranks = [StandIn(rank, world_size, port, records[len(str(rank))]) for rank in range(first, end)]
    places = {each.fileno(): (rank, number) for rank in ranks for number, each in enumerate(rank.sockets)}
    poll = select.epoll()
    for fileno in places:
        poll.register(fileno, select.EPOLLIN)
    base: Any = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    with ThreadPoolExecutor(3) as pool:
        while True:
            name = pipe.recv()
            for rank in ranks:
                rank.prepare(name)
            for rank in ranks:
                rank.listen()
            pipe.send("ready")
            alarm, cpu_s = pipe.recv(), time.process_time()
            if alarm == "all":
                for rank in ranks:
                    rank.hear_alarm()
            tasks, num_left = [], len(ranks)
            while num_left:
                for fileno, _ in poll.poll():
                    rank, number = places[fileno]
                    if task := rank.hear(number):
                        tasks.append(pool.submit(TASKS[task], rank, dist.PrefixStore(name, base)))
                    num_left -= rank.is_done
            for each in tasks:
                each.result()
            told = {
                "ends": [rank.ended for rank in ranks],
                "steps": [rank.step for rank in ranks],
                "messages": [],
                "cpu": time.process_time() - cpu_s,
            }
            pipe.send(told)


def ring(rank: StandIn, store: Any) -> None:
    """As `StoreExchange.request` does."""
    keys = [f"bell/{each}" for each in range(rank.world_size)]
    store.multi_set(keys, ["1" for _ in keys])


def conclude(rank: StandIn, store: Any) -> None:
    """A whole rank does what is left to do where all offers are there."""
    exchange = StoreExchange(lambda: store, rank=rank.rank, world_size=rank.world_size)
    exchange.decide("stop", offer_of(rank.rank), 0.01)
    exchange.close()


TASKS: dict[str, Callable[[StandIn, Any], None]] = {"ring": ring, "conclude": conclude}


if __name__ == "__main__":
    sys.exit(main())
