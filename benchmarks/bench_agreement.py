"""Seconds, and messages to the store, until all ranks of a job know the step at which they stop.

    python benchmarks/bench_agreement.py [--ranks 256 1024 4096] [--alarms all one] [--processes 4] [--rounds 7]

The ranks are simulated: each is a `StoreExchange` of its own with three connections, its listener and its threads, as
in a real rank, and a thread that does what a guard's watcher does at a stop: ask (where it has heard the alarm), make
an offer, wait for the decision. They are divided among a few processes. One real TCPStore, in a process of its own,
serves all. In a real job each rank has an interpreter to itself; here many share one, and this machine's cores.

- `all`: a launcher signals all ranks at once.
- `one`: one rank hears the alarm; its request wakes the listeners of the others.

`seconds`: from the alarm to the moment at which the last rank has the decision. `median rank`: of a rank in the middle.
`server cpu`, `ranks cpu`: CPU seconds of the store's process and of all simulated ranks. `messages`: the most that one
rank has sent after the alarm, its listener's included; `per rank`: the mean. All ranks must agree, or the run fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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

ALARMS = ("all", "one")
TARGET_S, TARGET_MESSAGES = 1.0, 8
PATIENCE_S = 600.0  # for the offers of all ranks: the benchmark measures how long it takes, and does not cut it off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--alarms", nargs="+", choices=ALARMS, default=list(ALARMS))
    parser.add_argument("--processes", type=int, default=4, help="that the simulated ranks share (default 4)")
    harness.add_arguments(parser)
    args = parser.parse_args()
    ask_again_soon()
    store_exchange._ANSWER_S = PATIENCE_S  # a rank that gave a slow store up would let all others wait for its offer
    report = harness.Report(args)
    for world_size in args.ranks:
        with Job(world_size, args.processes) as job:
            methods: dict[str, harness.Method] = {alarm: partial(job.stop, alarm) for alarm in args.alarms}
            compared = harness.compare(f"{world_size} ranks", methods, rounds=args.rounds, warm_up=1)
        limits = [harness.Target(method=alarm, at_most=TARGET_S) for alarm in args.alarms]
        limits += [harness.Target(method=alarm, figure="per rank", at_most=TARGET_MESSAGES) for alarm in args.alarms]
        report.add(compared, targets=limits)
    return report.end()


class Job:
    """The store's process, and those of the simulated ranks. All are forked, so that torch is imported once."""

    def __init__(self, world_size: int, num_processes: int) -> None:
        self.world_size = world_size
        self._stack = ExitStack()
        try:
            self.server = self._start(serve)
            port = self.server.recv()
            bounds = [world_size * number // num_processes for number in range(num_processes + 1)]
            self.workers = [
                self._start(simulate, world_size, first, end, port) for first, end in pairwise(bounds) if first < end
            ]
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
            worker.send(f"round {self.num_rounds}")
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
        return {
            harness.SECONDS: ends[-1],
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
            self.exchange.request(
                {
                    "kind": "signal", "reason": "SIGTERM", "origin": self.rank, "exit_code": 143, "signum": 15,
                    "grace_left_s": 30.0,
                }
            )  # fmt: skip
        decision = self.exchange.decide("stop", self.rank % 5, PATIENCE_S)
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
        opened = list(pool.map(lambda _: base.clone(), range(3 * (end - first))))
    while True:
        prefix = pipe.recv()
        ranks = [Rank(first + number, world_size, prefix, opened[3 * number :][:3]) for number in range(end - first)]
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


if __name__ == "__main__":
    sys.exit(main())
