"""Seconds, and messages to the store, until all ranks of a job know the step at which they stop.

    python benchmarks/bench_agreement.py [--ranks 256 1024 4096] [--alarms all one] [--processes 2] [--rounds 7]

The ranks are simulated: each is a `StoreExchange` of its own with three connections, its listener and its threads, as in
a real rank, and a thread that does what a guard's watcher does at a stop: ask (where it has heard the alarm), make an
offer, wait for the decision. They are divided among a few processes. One real TCPStore, in a process of its own, serves
all. In a real job each rank has an interpreter to itself; here many share one and this machine's cores.

- `all`: a launcher signals all ranks at once.
- `one`: one rank hears the alarm; its request wakes the listeners of the others.

`seconds`: from the alarm to the moment at which the last rank has the decision. `median rank`: of a rank in the middle.
`server cpu`, `ranks cpu`: CPU seconds of the store's process and of all simulated ranks. `messages`: the most that one
rank has sent, its listener's included; `per rank`: the mean. `alone`: ranks that did not agree, which fails the run.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import harness
from mindx_elastic.agreement.hosting import ask_again_soon, host_store

ALARMS = ("all", "one")
PATIENCE_S = float(os.environ.get("PAT","300"))  # for the offers of all ranks: the benchmark measures how long it takes, and does not cut it off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--alarms", nargs="+", choices=ALARMS, default=list(ALARMS))
    parser.add_argument("--processes", type=int, default=2, help="that the simulated ranks share (default 2)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--simulate", type=int, nargs=4, help=argparse.SUPPRESS)
    harness.add_arguments(parser)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    if args.simulate:
        simulate(*args.simulate)
        return 0
    ask_again_soon()
    report = harness.Report(args)
    for world_size in args.ranks:
        with Job(world_size, args.processes) as job:
            methods: dict[str, harness.Method] = {alarm: lambda alarm=alarm: job.stop(alarm) for alarm in args.alarms}  # type: ignore[misc]
            compared = harness.compare(f"{world_size} ranks", methods, rounds=args.rounds, warm_up=1)
        limits = [harness.Target(method=alarm, at_most=1.0) for alarm in args.alarms]
        limits += [harness.Target(method=alarm, figure="per rank", at_most=12) for alarm in args.alarms]
        report.add(compared, targets=limits)
    return report.end()


class Job:
    """The store's process, and those of the simulated ranks."""

    def __init__(self, world_size: int, num_processes: int) -> None:
        self.world_size = world_size
        self._stack = ExitStack()
        try:
            self.server = self._start("--serve")
            port = json.loads(self._line(self.server))["port"]
            bounds = [world_size * number // num_processes for number in range(num_processes + 1)]
            self.workers = [
                self._start("--simulate", str(world_size), str(first), str(end), str(port))
                for first, end in zip(bounds, bounds[1:], strict=False)
                if first < end
            ]
            self.num_rounds = 0
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark has ended with {process.wait()}")
        return line

    @staticmethod
    def _tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def _server_cpu_s(self) -> float:
        self._tell(self.server, "cpu")
        return float(json.loads(self._line(self.server))["cpu"])

    def stop(self, alarm: str) -> dict[str, float]:
        """One stop of all ranks."""
        self.num_rounds += 1
        for worker in self.workers:
            self._tell(worker, f"round {self.num_rounds}")
        for worker in self.workers:
            assert self._line(worker).strip() == "ready"
        server_s = self._server_cpu_s()
        began = time.monotonic()
        for worker in self.workers if alarm == "all" else self.workers[:1]:
            self._tell(worker, alarm)
        for worker in self.workers if alarm == "one" else ():
            if worker is not self.workers[0]:
                self._tell(worker, "none")
        told = [json.loads(self._line(worker)) for worker in self.workers]
        ends = sorted(end - began for each in told for end in each["ends"])
        steps = {step for each in told for step in each["steps"]}
        if len(ends) != self.world_size or steps != {4}:
            raise RuntimeError(f"{self.world_size} ranks, and the decisions {steps} of {len(ends)}")
        messages = [count for each in told for count in each["messages"]]
        return {
            harness.SECONDS: ends[-1],
            "median rank": statistics.median(ends),
            "server cpu": self._server_cpu_s() - server_s,
            "ranks cpu": sum(each["cpu"] for each in told),
            "messages": max(messages),
            "per rank": statistics.mean(messages),
        }


def serve() -> None:
    """The store's process. Each line of input is answered with its CPU time."""
    store = host_store("127.0.0.1", timeout=timedelta(seconds=30))
    print(json.dumps({"port": store.port}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"cpu": time.process_time()}), flush=True)


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
        import torch.distributed as dist

        from mindx_elastic.agreement.store_exchange import StoreExchange

        self.rank = rank
        self.connections = [Counted(dist.PrefixStore(prefix, store)) for store in stores]
        unused = iter(self.connections)
        self.exchange = StoreExchange(lambda: next(unused), rank=rank, world_size=world_size)  # type: ignore[arg-type,return-value]
        self.alarms: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.ended, self.step = 0.0, None
        self.exchange.listen(lambda content: self.alarms.put(False))
        self.watcher = threading.Thread(target=self._watch)
        self.watcher.start()

    def _watch(self) -> None:
        if self.alarms.get():
            self.exchange.request(
                {
                    "kind": "signal", "reason": "SIGTERM", "origin": self.rank, "exit_code": 143, "signum": 15,
                    "grace_left_s": 30.0,
                }
            )  # fmt: skip
        decision = self.exchange.decide("stop", self.rank % 5, PATIENCE_S)
        self.ended, self.step = time.monotonic(), decision.step  # type: ignore[assignment]
        if decision.step is None:
            print(f"rank {self.rank}: {decision.reason}", file=sys.stderr)


def simulate(world_size: int, first: int, end: int, port: int) -> None:
    """Some of the ranks. Reads what to do from its input: a round's number, and then the alarm."""
    import faulthandler; faulthandler.register(10, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    threading.stack_size(256 << 10)
    base = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    # At once: a connection looks up the name of its other end, which takes a second where a name server loses the answer.
    with ThreadPoolExecutor(64) as pool:
        opened = list(pool.map(lambda _: base.clone(), range(3 * (end - first))))
    stores = {rank: opened[3 * number : 3 * number + 3] for number, rank in enumerate(range(first, end))}
    for line in sys.stdin:
        ranks = [Rank(rank, world_size, line.strip(), stores[rank]) for rank in range(first, end)]
        opening = [sum(connection.num_messages for connection in rank.connections) for rank in ranks]
        print("ready", flush=True)
        alarm = sys.stdin.readline().strip()
        cpu_s = time.process_time()
        for rank in {"all": ranks, "one": ranks[:1], "none": []}[alarm]:
            rank.alarms.put(True)
        for rank in ranks:
            rank.watcher.join()
        cpu_s = time.process_time() - cpu_s
        told = {
            "ends": [rank.ended for rank in ranks],
            "steps": [rank.step for rank in ranks],
            "messages": [
                sum(connection.num_messages for connection in rank.connections) - before
                for rank, before in zip(ranks, opening, strict=True)
            ],
            "cpu": cpu_s,
        }
        for rank in ranks:
            rank.exchange.close()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main())
