"""Agents of several nodes in one process, on a simulated clock, network and store. One seed is one story.

What decides is the code that runs (`nodes`). Simulated are what is around it: time, the store, the connections between
agents and the processes of ranks. A node may crash, stand still, or be cut off from the first one; a rank may be killed
or fail by itself at any moment; connections end and come back, words come late; what threads of one agent do comes in
any order.

What must hold at every moment: two processes of a rank never train in one generation; only a node that was out of
reach, or stood still, is taken for lost; when one node restarts the job, all others do soon. And in the end
(`Job.check_end`): all nodes that go on have the same recoveries behind them and one process for each rank.

    python -m tests.simulation.agents [--schedules 1000] [--first 0] [--seed 7]
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mindx_elastic.agent import nodes_recovery, recovery
from mindx_elastic.agent.failure_detector import BACK_S, SILENCE_S
from tests.simulation.nodes import TIMEOUT_S, Clock, Node

__all__ = ["TICK_S", "TIMEOUT_S", "Job", "play", "play_any", "play_mildly"]

TICK_S = 0.25
_NOTICED_S = 5.0
_BEAT_S = 1.0
_LATE_S = (0.0, 0.0, 0.0, TICK_S, 3 * TICK_S)
_TOGETHER_S = 15.0
"""So soon a job that one node restarts is restarted by all that can hear it."""
_CALM_S = 4 * TIMEOUT_S
_QUIET_S = SILENCE_S + 3.0


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
        for each in self.nodes[1:]:
            self._connect(each)

    def new_pid(self) -> int:
        self._pid += 1
        return self._pid

    def tell(self, words: str) -> None:
        self.story.append(f"{self.clock.now - 1000:.2f} s: {words}")

    # --- the network --------------------------------------------------------------------------------------------------

    def send(self, node: Node, to: str, word: bytes) -> None:
        last = max((at for at, side, _ in node.connection.words if side == to), default=0.0)
        node.connection.words.append((max(last, self.clock.now + self.dice.choice(_LATE_S)), to, word))

    def _connect(self, node: Node) -> None:
        """The first machine takes the connection also where its agent stands still, and has not read the greeting."""
        line = node.connection
        line.theirs = node.agents.greet(0, self.clock.now, name="", ranks=())
        line.stands = True
        line.words.append((self.clock.now, "first", b"hello"))

    def break_connection(self, node: Node, retry_s: float) -> None:
        """What was under way is lost. Each side reads of its end when it comes to it."""
        line, now = node.connection, self.clock.now
        if line.stands:
            was_heard = all(word != b"hello" for _, _, word in line.words)
            line.words = [each for each in line.words if not each[2]] + [(now, "other", b"")]
            if was_heard:
                line.words.append((now, "first", b""))
        line.stands, line.retry_at = False, now + retry_s

    def _keep_up(self, node: Node) -> None:
        """What the machines do with a connection, and the node's own thread."""
        line, first, now = node.connection, self.nodes[0], self.clock.now
        if node.is_crashed or first.is_crashed or node.is_cut:
            self.break_connection(node, 0.0)
        elif node.is_still or node.has_ended:
            pass
        elif not line.stands:
            has_read_its_end = all(side == "first" for _, side, _ in line.words)
            if now >= line.retry_at and has_read_its_end and not first.has_ended:
                self._connect(node)
        elif now >= line.beat_at:
            line.beat_at = now + _BEAT_S
            self.send(node, "first", b".")

    def _listen(self, side: Node) -> None:
        """What the thread of this node's agent does that reads its connections."""
        if side.is_still or side.is_crashed:
            return
        for node in [side] if side.node else self.nodes[1:]:
            self._hear(node, "other" if side.node else "first")
        side.agents.look(self.clock.now)

    def _hear(self, node: Node, to: str) -> None:
        line, first, now = node.connection, self.nodes[0], self.clock.now
        for word in [each for each in line.words if each[0] <= now and each[1] == to]:
            line.words.remove(word)
            what = word[2]
            if to == "other":
                if what:
                    node.agents.hear(0, now, goodbye=what == b"bye")
                else:
                    node.agents.end(0, now, connection=line.theirs)
            elif what == b"hello":
                line.mine = first.agents.greet(node.node, now, name=node.name, ranks=tuple(node.own))
            elif not what:
                first.agents.end(node.node, now, connection=line.mine)
            else:
                first.agents.hear(node.node, now, goodbye=what == b"bye")
                if not first.has_ended and line.stands:
                    self.send(node, "other", b".")

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
                    acts.append(partial(self._listen, node))
                    if node.node:
                        self._keep_up(node)
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
        for node in self.nodes:
            node.still.note(now, is_so=node.is_still)
            is_away = not node.connection.stands or node.is_cut or node.is_crashed or first.is_crashed
            node.connection.away.note(now, is_so=is_away)
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
        what = what or self.dice.choice(("kill", "kill", "fail", "crash", "still", "still", "cut", "reset", "wake"))
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
            elif what == "reset" and node.node:
                self.break_connection(node, self.dice.choice((0.0, TICK_S, 2.0)))
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

    def check_loss(self, lost: Node, other: Node) -> None:
        """`lost` is taken for lost, by the first agent, or is the first one, and taken so by `other`. The connection is
        that of the one that is not the first."""
        now = self.clock.now
        is_away = other.connection.away.seconds(now) >= BACK_S - 2 * TICK_S
        is_still = lost.still.seconds(now) >= SILENCE_S - _BEAT_S - max(_LATE_S) - TICK_S
        assert not lost.goes_on or is_away or is_still, self.tale(f"{lost.name} is taken for lost, and is well")

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
        others = job.nodes[1:]
        what = job.dice.choice(("kill", "reset", "still"))
        if what == "reset":
            node = job.dice.choice(others)
            job.tell(f"a short reset of {node.name}")
            job.break_connection(node, job.dice.choice((0.0, TICK_S)))
        elif what == "kill":
            job.fault("kill", job.dice.choice(job.going()))
        else:  # it stands still for a moment; a connection may be reset meanwhile
            node = job.dice.choice(job.going())
            if node.node == 0 and job.dice.random() < 0.5:  # the news of it is the last that the first agent hears
                job.break_connection(job.dice.choice(others), job.dice.choice((0.0, 0.5)))
                job.run(TICK_S)
            job.fault("still", node)
            job.run(job.dice.choice((1.0, 1.5, 2.0, 3.0, 6.0)))
            if job.dice.random() < 0.5:
                job.break_connection(job.dice.choice(others), job.dice.choice((0.0, 0.5)))
                job.run(job.dice.choice((1.0, 3.0)) if node.node == 0 else 0.0)
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
