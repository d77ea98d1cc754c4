"""Agents of several nodes in one process, on a simulated clock, network and store. One seed is one story.

What decides is the code that runs (`nodes`). Simulated are what is around it: time, the store and the processes of
ranks. A node may crash, stand still, or be cut off; a rank may be killed or fail by itself at any moment; what threads
of one agent do comes in any order.

What must hold at every moment: two processes of a rank never train in one generation; when one node restarts the job,
all others do soon. And in the end (`Job.check_end`): all nodes that go on have the same recoveries behind them and one
process for each rank.

    python -m tests.simulation.agents [--schedules 1000] [--first 0] [--seed 7]
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindx_elastic.agent import nodes_recovery, recovery
from tests.simulation.nodes import LOST_S, TIMEOUT_S, Clock, Node

__all__ = ["TICK_S", "TIMEOUT_S", "Job", "play", "play_any", "play_mildly"]

TICK_S = 0.25
_NOTICED_S = 5.0
_TOGETHER_S = 15.0
"""So soon a job that one node restarts is restarted by all that can hear it."""
_CALM_S = 4 * TIMEOUT_S
_QUIET_S = LOST_S + 3.0


class Job:
    """Some nodes, and what happens to them."""

    def __init__(self, seed: int, *, num_nodes: int = 3, ranks: int = 1) -> None:
        self.seed = seed
        self.dice, self.clock, self.content = random.Random(seed), Clock(), dict[str, bytes]()
        self.num_nodes, self.ranks, self.world_size = num_nodes, ranks, num_nodes * ranks
        self.story: list[str] = []
        self.is_broken = False
        """A rank has had no process for so long that all others have noticed."""
        self.step, self.trained_at = 7, self.clock.now
        """The last boundary that all ranks have passed, and when."""
        self._whole_at = self.clock.now
        self._pid = 100
        self.nodes = [Node(self, node) for node in range(num_nodes)]

    def new_pid(self) -> int:
        self._pid += 1
        return self._pid

    def tell(self, words: str) -> None:
        self.story.append(f"{self.clock.now - 1000:.2f} s: {words}")

    # --- time ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _patched(self) -> Iterator[None]:
        modules: list[Any] = [recovery, nodes_recovery]
        before = [module.time for module in modules]
        for module in modules:
            module.time = self.clock
        try:
            yield
        finally:
            for module, old in zip(modules, before, strict=True):
                module.time = old

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        with self._patched():
            while self.clock.now < end:
                self.clock.now += TICK_S
                self._note_state()
                acts: list[Callable[[], None]] = []
                for node in self.nodes:
                    if node.goes_on and not node.is_still:
                        acts += [node.watch_plans, node.step, node.step_ranks]
                self.dice.shuffle(acts)
                for act in acts:
                    act()
                self.check()

    def calm_down(self) -> None:
        """Go on until nothing has happened for a while."""
        end, quiet_at, before = self.clock.now + _CALM_S, self.clock.now, ""
        while self.clock.now < min(end, quiet_at + _QUIET_S):
            self.run(1.0)
            now = str([(n.has_ended, n.recovery._machine.generation, len(n.live)) for n in self.nodes])
            is_busy = any(node.recovery.is_active or node.leaves_at is not None for node in self.going())
            if now != before or is_busy:
                before, quiet_at = now, self.clock.now

    def _note_state(self) -> None:
        now, first = self.clock.now, self.nodes[0]
        world, going = set(range(self.world_size)), self.going()
        is_whole = {rank for node in going for rank in node.live} == world
        self._whole_at = now if is_whole else self._whole_at
        self.is_broken = now - self._whole_at > _NOTICED_S
        well = [node for node in going if node.is_well and not node.recovery.is_active]
        if {rank for node in well for rank, each in node.live.items() if not each.has_left} == world:
            self.step, self.trained_at = self.step + 1, now
        ends = not first.goes_on or any(node.is_end_heard for node in self.nodes)
        for node in going:
            is_alone = ends and node.leaves_at is None and node.is_well and not first.is_still
            node.alone_s = node.alone_s + TICK_S if is_alone else 0.0

    # --- faults -------------------------------------------------------------------------------------------------------

    def fault(self, what: str = "", node: Node | None = None) -> None:
        """Something bad, at this moment."""
        node = node or self.dice.choice(self.nodes)
        what = what or self.dice.choice(("kill", "kill", "fail", "crash", "still", "still", "cut", "wake"))
        self.tell(f"{what} {node.name}")
        with self._patched():
            if what in ("kill", "fail") and node.goes_on:
                node.kill(self.dice.choice(list(node.own)), by_itself=what == "fail")
            elif what == "crash":
                node.is_crashed = True
                node.live.clear()
            elif what == "still":
                node.is_still = True
            elif what == "cut" and node.node:
                node.is_cut = True
            elif what == "wake":
                self.heal()

    def heal(self) -> None:
        """Who stands still goes on, and who is cut off is reached again."""
        for node in self.nodes:
            node.is_still = node.is_cut = False

    # --- what must hold -----------------------------------------------------------------------------------------------

    def going(self) -> list[Node]:
        return [node for node in self.nodes if node.goes_on]

    def check(self) -> None:
        newest: dict[tuple[int, int], int] = {}
        for node in self.going():
            for process in node.live.values():
                if process.generation and not process.has_left:
                    key = (process.generation, process.number)
                    assert key not in newest, self.tale(f"two processes of rank {process.number} train in {key[0]}")
                    newest[key] = process.pid
            assert node.alone_s <= _TOGETHER_S, self.tale(f"{node.name} goes on alone: another node restarts the job")

    def check_end(self) -> None:
        """All are healed, and much time has passed: who goes on, goes on with the same generation and all ranks."""
        going = self.going()
        if not going:
            return
        assert not any(node.recovery.is_active for node in going), self.tale("a recovery never ends")
        generations = {node.recovery._machine.generation for node in going}
        assert len(generations) == 1, self.tale(f"nodes go on in generations {generations}")
        ranks = sorted(rank for node in going for rank in node.live)
        assert ranks == list(range(self.world_size)), self.tale(f"ranks {ranks} go on")

    def tale(self, words: str) -> str:
        return "\n".join([f"seed {self.seed}: {words}", *self.story])


def play(seed: int, *, num_nodes: int = 3, ranks: int = 1) -> Job:
    """One story: up to six faults, seconds apart or at once, and then all that stands still or is cut off comes
    back."""
    job = Job(seed, num_nodes=num_nodes, ranks=ranks)
    job.run(2.0)
    for _ in range(job.dice.randint(1, 6)):
        job.fault()
        job.run(job.dice.choice((0.0, 0.25, 0.5, 1.0, 3.0, 12.0)))
    job.heal()
    job.calm_down()
    job.check_end()
    return job


def play_mildly(seed: int) -> Job:
    """A story of faults that a job outlives, one after the other: it goes on."""
    job = Job(seed)
    job.run(2.0)
    for _ in range(job.dice.randint(1, 4)):
        assert len(job.going()) == job.num_nodes, job.tale("the job could have gone on")
        what, node = job.dice.choice(("kill", "still", "cut")), job.dice.choice(job.nodes[1:])
        job.fault(what, node)
        if what != "kill":  # for a moment; a rank may be killed meanwhile, where the store is reached
            job.run(job.dice.choice((1.0, 1.5, 2.0, 3.0)))
            if what == "still" and job.dice.random() < 0.5:
                job.fault("kill", job.dice.choice([each for each in job.nodes if each is not node]))
                job.run(job.dice.choice((0.0, 1.0)))
            job.heal()
        job.run(TIMEOUT_S / 2)
    job.calm_down()
    job.check_end()
    assert len(job.going()) == job.num_nodes, job.tale("the job could have gone on")
    return job


def play_any(seed: int) -> Job:
    return play_mildly(seed) if seed % 4 == 3 else play(seed)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--until-wrong", action="store_true", help="end with the first story that is wrong")
    parser.add_argument("--seed", type=int, help="tell the story of this one")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        print("\n".join(play_any(options.seed).story))
        return 0
    failed = 0
    for seed in range(options.first, options.first + options.schedules):
        try:
            play_any(seed)
        except Exception as error:  # of the package: a broken rule, too
            failed += 1
            words = str(error).partition("\n")[0] or type(error).__name__
            print(words if words.startswith("seed ") else f"seed {seed}: {type(error).__name__}: {words}", flush=True)
            if options.until_wrong:
                break
    print(f"{options.schedules} stories, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
