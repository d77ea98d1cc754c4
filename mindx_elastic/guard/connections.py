"""Opens and closes the guard's connections to the other ranks, the agent, shared memory, and other nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from mindx_elastic.agreement.connect import store_host
from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Part
from mindx_elastic.agreement.stop_step import CANNOT
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import AgentInfo, MemorySettings, RedundancySettings
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.guard.agent_link import AgentLink, between_steps
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.memory.boundaries import StepCounter
from mindx_elastic.memory.memory import open_memory
from mindx_elastic.memory.snapshots import NO_SNAPSHOTS
from mindx_elastic.mirror.mirror import Mirror, NodesPart
from mindx_elastic.rejoin.member import Member
from mindx_elastic.start.restore import Resumed

if TYPE_CHECKING:
    from mindx_elastic.archive.archive import Archive

__all__ = ["Connections"]

_DURABLE_S = 5.0


class Connections:
    """One per guard. Main thread; `stack` closes everything in the end."""

    def __init__(
        self,
        stack: ExitStack,
        directories: Sequence[Path],
        saver: Saver,
        snapshot_every: int | str | None,
        redundancy: int | None,
        exchange: Exchange,
        archive: str = "",
        *,
        home: Path | None = None,
        evaluates: bool = False,
        member: Member | None = None,
    ) -> None:
        """`home`: the directory that names the folder in shared memory; default the first one. `evaluates`: the guard
        does not train and takes no snapshots. Raises UsageError for impossible settings."""
        ranks = self._ranks = saver.ranks
        self.evaluates = evaluates
        self.exchange = exchange
        agent = AgentInfo.from_env()
        self.link = None if agent is None else AgentLink(agent, ranks, page=None if member is None else member.page)
        if member is not None and self.link is not None:
            member.page = self.link.page
        self.page = StatusPage() if self.link is None else self.link.page
        """What this rank tells its agent."""
        self._member = member
        if self.link is not None:
            stack.callback(self.link.close)
            stack.push(self._note_error)
        settings = MemorySettings.from_env().with_every(snapshot_every)
        home = self.home = home or directories[0]
        kept = None if member is None else member.take_arena()
        self.memory = None if evaluates else open_memory(settings, home, ranks, replicated=saver.replicated, kept=kept)
        self.sees_steps = self.memory is not None or self.link is not None
        """`at_boundary` has something to do."""
        self.keep_memory = True
        """Keep the snapshots until all ranks are known to be durable on disk."""
        self._stays = False  # in this process, for the guard's next entry
        stack.callback(self._close_memory)  # at once: an error from here on must not leave the arena locked
        self._saver, self._stack, self._directories = saver, stack, directories
        copies = RedundancySettings.from_env().with_copies(redundancy)
        self._nodes = NodesPart(copies, ranks, store_host())
        self.mirror: Mirror | None = None
        """Keeps copies of the files on other nodes, and carries them between these; None without redundancy."""
        self.archive: Archive | None = None
        """The second place of the files."""
        if archive and not evaluates:
            from mindx_elastic.archive.archive import Archive

            self.archive = Archive(archive, ranks, directories, saver.events, saver.trust)
            stack.callback(self.archive.close)

    def parts(self) -> list[Part]:
        """Its parts of the first meeting."""
        return [self._nodes] if self.archive is None else [self._nodes, self.archive.part]

    def later_parts(self) -> list[Part]:
        """Its parts of the second meeting."""
        return [] if self.mirror is None else [self.mirror.endpoints]

    def connect(self) -> None:
        """After the first meeting."""
        if self.memory is None:
            self.exchange.tell("snapshot_every", NO_SNAPSHOTS)  # the others need not wait for its measurement
        arena = None if self.memory is None or self._saver.replicated else self.memory.arena
        saver = self._saver
        self.mirror = self._nodes.open_mirror(self._directories, self.exchange, saver.events, saver.trust, arena)
        if self.mirror is not None:
            close = self.mirror.close
            self._stack.callback(lambda: close(keeps_memory=self.keep_memory))

    def greet(self) -> None:
        """After the second meeting, in which the ranks have told each other where they receive files."""
        if self.mirror is not None:
            self.mirror.greet()

    @property
    def arenas(self) -> Path | None:
        """The job's folder in shared memory."""
        return None if self.memory is None else self.memory.folder

    @property
    def takes_snapshots(self) -> bool:
        """Whether the guard copies the state to shared memory every few steps."""
        return self.memory is not None and self.memory.takes_snapshots

    @property
    def steps_file(self) -> Path | None:
        """Where a little of each step is kept for the process after a kill; None: there are no snapshots to go on
        from."""
        return self.memory.steps_file if self.takes_snapshots and self.memory else None

    def announce(self, found: Resumed | None) -> None:
        """Tell the agent which step is about to be loaded."""
        if found is not None:
            self.page.set_text("resumed_path", str(found.path))
            self.page.set(resumed_step=found.checkpoint.info.step)

    def enter(
        self,
        resumed: Resumed | None,
        run_id: str,
        update_gate: UpdateGate,
        *,
        replicas: list[nn.Module],
        counter: StepCounter,
        begins_again: bool = False,
    ) -> None:
        """Training begins with the restored state. `replicas`: the modules that other ranks hold, too.
        `begins_again`: after a recovery in place."""
        saver = self._saver
        if self.memory is not None:
            self.memory.start(
                saver.collector,
                update_gate,
                self.exchange,
                saver.events,
                replicas=replicas,
                all_alike=saver.replicated,
                counter=counter,
                describe=lambda: saver.describe("snapshot"),
                resumed=None if resumed is None else resumed.checkpoint.info,
                donates=self._member is not None,
                begins_again=begins_again,
                tell_interval=lambda every: self.page.set(snapshot_every=every),
                neighbours=None if self.mirror is None else self.mirror.nearby,
            )
        if self.mirror is not None:
            self.mirror.endpoints.close()
        if self.mirror is not None and resumed is not None:
            # The nodes that held its copies may have lost them.
            self.mirror.submit(resumed.path, resumed.checkpoint.info.step)
            has_same_ranks = resumed.checkpoint.info.world_size == self._ranks.world_size
            if self.mirror.nearby is not None and self.takes_snapshots and has_same_ranks:
                self.mirror.nearby.copy_newest()
        if self.archive is not None and resumed is not None:
            # The process that wrote it may have had no time to.
            self.archive.submit(resumed.path, resumed.checkpoint.info.step)
        if self.link is not None:
            self.link.enter(None if resumed is None else resumed.checkpoint.info.step, run_id, self.arenas, self.home)

    def at_boundary(
        self,
        step: int,
        *,
        cut: bool,
        tail_follows: bool = False,
        after_tail: bool = False,
    ) -> None:
        """Training thread: `step` has ended; `cut`: it can be resumed from. The tail: see `Memory.at_boundary`."""
        if self.memory is not None and cut:
            self.memory.at_boundary(step, tail_follows=tail_follows, after_tail=after_tail)
        if self.link is not None:
            self.page.pass_boundary(step, cut=cut)

    def between_steps(self) -> AbstractContextManager[None]:
        """Training thread: the agent does not take the time inside for a hang."""
        return between_steps(self.page)

    def keep_in_memory(self, timeout_s: float, gone: Collection[int]) -> bool:
        """Put the last boundary into shared memory; returns whether it is there. Any thread that holds the update gate
        and has found it clean. `gone`: the ranks known to be dead."""
        first = self._ranks.rank - self._ranks.local_rank
        copies = all(rank in gone for rank in range(first, self._ranks.rank))  # what all hold, for all of the machine
        return self.memory is not None and self.memory.keep(timeout_s, whole=copies)

    def leave(self, stopper: Stopper) -> None:
        """The job stops. Release the memory once every rank has reported that the agreed step is on its disk."""
        saved = None if stopper.save.path is None else stopper.save.step
        if self._ranks.world_size == 1:
            self.keep_memory = saved is None
            return
        if stopper.agreed_step is None:
            return  # a rank is gone, or each has acted alone
        if saved is None or self.memory is None:
            self.exchange.announce("durable", CANNOT if saved is None else saved)  # no rank waits for it
            return
        left_s = min(_DURABLE_S, max(0.0, stopper.time_left_s / 3))
        self.keep_memory = self.exchange.decide("durable", saved, left_s).step != saved

    def finish(self, *, durable: bool) -> None:
        """The block has ended by itself; `durable`: its last boundary is on this rank's disk.

        If it is not, with an agent it stays in memory until all workers have ended well: an evaluation or an export
        after the block may fail, and must not cost the training.
        """
        self.keep_memory = not durable and self.link is not None and self.memory is not None and self.memory.take_last()
        self.page.set(finished=1)

    def stay_open(self) -> None:
        """The guard is about to be left, and entered again in this process: what is costly to open stays."""
        self._stays = True
        if self.link is not None:
            self.link.stays = True

    def _note_error(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Entering has failed: give the agent the cause."""
        if self.link is not None and error is not None:
            self.link.page.set_text("reason", f"{type(error).__name__}: {error}")

    def _close_memory(self) -> None:
        if self.memory is not None and self._member is not None and self._stays:
            self._member.arena = self.memory.release()
        elif self.memory is not None:
            self.memory.close(keep=self.keep_memory)
