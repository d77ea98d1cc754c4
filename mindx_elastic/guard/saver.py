"""Saves a boundary: names, headers, the files of a stop, periodic saves, and the deletion of old files."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import to_host
from mindx_elastic.config import RankInfo, SavingSettings
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.folders import rank_folder
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.position import Position
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.errors import SaveError, UnsupportedStateError
from mindx_elastic.guard.divided_saves import DividedSaves
from mindx_elastic.guard.periodic import PeriodicSave
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.mirror.mirror import Mirror
from mindx_elastic.persist.catalog import CatalogEntry, read_entries
from mindx_elastic.persist.direct_io import Reserve
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.format import CheckpointInfo, Held
from mindx_elastic.persist.retention import choose_deletions
from mindx_elastic.persist.save_queue import SaveQueue
from mindx_elastic.persist.storage import make_directory_durable
from mindx_elastic.persist.writer import Flat, SaveResult, previous_path, write_checkpoint
from mindx_elastic.platforms.flag_file import AnsweredFlags
from mindx_elastic.start.inventory import newest_complete

if TYPE_CHECKING:
    from mindx_elastic.archive.archive import Archive

__all__ = ["DeviceWentOnError", "Saver"]

_AGREE_S = 5.0  # the others come to the same step in a moment
_BASE = ("base_attempt", "base_step")
"""Coordinates of a header: the step that the file's attempt went on from."""


class DeviceWentOnError(OSError):
    """The device was slow, not stuck: what was read of an older boundary is worth nothing, and a newer one is there."""


class Saver:
    """Writes this rank's checkpoints. `save_periodic` and `close` belong to the training thread.

    It is made before the ranks meet, and needed by the start, which sets what only it has found out.
    """

    def __init__(
        self,
        collector: Collector,
        ranks: RankInfo,
        events: EventLog,
        *,
        resolved: Mapping[Path, Path] | None = None,
        replicated: bool = False,
        trust: Trust | None = None,
        names: Sequence[str] = (),
        unmanaged: Unmanaged | None = None,
    ) -> None:
        self.trust = trust or Trust()
        """Whose files count."""
        self.names = tuple(names)
        """The prefixes of this job's files."""
        self._unmanaged = unmanaged or Unmanaged("error")
        self.collector, self.ranks, self.events = collector, ranks, events
        self._resolved = resolved or {}  # directories as given -> as resolved once, at the start
        self.replicated = replicated
        """Every rank holds the same weights."""
        self.lacked: Sequence[str] = ()
        """Then: the modules that other ranks have and this one has not."""
        self.coordinates = {"replicas": ranks.world_size} if replicated else {}
        """Numbers for every file's header."""
        self.newest_step = 0
        """The newest step that this process knows to be on disk: resumed from, or written by it; 0 for none."""
        self.page = StatusPage()
        """Where the agent reads how this process stands."""
        self._nbytes = self._stall_ns = 0
        self.bytes_per_s: float | None = None
        """Speed of this process's slowest save so far, for the deadline's reserve."""
        self.expected_bytes = 3 * sum(p.nbytes for p in collector.parameters)
        """About the size of a save: parameters and the two moments of Adam."""
        self.reserve: Reserve | None = None
        """Memory and a thread for a dying save in a process that can get no more."""
        self._page_cache = SavingSettings.from_env().page_cache
        self.together: DividedSaves | None = None
        """Saves with the other ranks at an agreed stop; None: each writes all it has."""
        self.mirror: Mirror | None = None
        """Copies the files to other nodes, once they are durable here."""
        self.archive: Archive | None = None
        """Takes the files to a second place, once they are durable here."""
        self.gone: Callable[[], Sequence[int]] = lambda: ()
        """Returns the ranks known to be dead."""
        self.keep_in_memory: Callable[[float], bool] = lambda timeout_s: False
        """Puts the last boundary into shared memory, for the thread that holds the update gate; returns whether it is
        there. Takes seconds."""
        self.newest: tuple[int, Path] | None = None
        """The last step that this process has saved where a start looks, and its file."""
        self.flags = AnsweredFlags()
        """The flag files that have stopped this run."""
        self._queue = SaveQueue()
        self._entries: dict[Path, tuple[CatalogEntry, ...]] = {}  # headers already read need not be read again

    @property
    def is_refused(self) -> bool:
        """Whether the training was refused (`UnmanagedStateError`): nothing of it may be saved."""
        return self._unmanaged.refusal is not None

    def go_on_from(self, resumed: CheckpointInfo) -> None:
        """Main thread, before the first save: this run goes on from that file."""
        # A start that would not be exact at the first steps of this attempt goes back to there: every later file says
        # it (`start.planner.steps_before`).
        self.coordinates |= dict(zip(_BASE, (resumed.attempt, resumed.step), strict=True))
        self.newest_step = resumed.step

    def folder(self, directory: Path) -> Path:
        """``directory``, or ``directory/rank_{r}`` when there are several ranks."""
        return rank_folder(self._root(directory), self.ranks.rank, self.ranks.world_size)

    def save_dying(
        self, policies: Sequence[ExitPolicy], reason: str, *, time_left_s: float = math.inf, agreed: bool = False
    ) -> SaveResult:
        """Write the boundary for all `policies`; the first one names the header's kind, the others get links.

        agreed: all ranks save this boundary now, by the same policies, and may divide it (see `divided_saves`).

        The caller holds the update gate or is the training thread at a boundary. `time_left_s`: until the process must
        be gone; a third of it may be spent on what policies do once the file is durable, and as much of the rest on
        copies of it. Raises SaveError.
        """
        began = time.monotonic()
        if self.reserve is not None:
            self.reserve.release()
        position = self.collector.position
        self.flags.answer()
        paths = [self._path(policy, position) for policy in policies]
        info = self._info(position, kind=policies[0].kind, reason=reason, append_info=policies[0].append_info)
        finishing = dict(zip(paths, policies, strict=True))
        write = partial(
            self._write,
            paths[0],
            also=paths[1:],
            finish=lambda path: self._finish(finishing[path], path, time_left_s / 3),
            dying=True,
        )
        together = self.together
        with self.collector.devices.reading(dying=True):
            state = self.collector.state()
            if together is None or not together.is_possible or not agreed:
                result = write(state, info)
            else:
                tree, tensors = flatten(state)
                left_s = began + time_left_s - time.monotonic()
                held = together.agree(info.step, tree, tensors, max(0.1, min(_AGREE_S, left_s / 4)))
                result = write(state, info, held=held, flat=(tree, tensors))
        if self.mirror is not None:
            self.mirror.deliver(result.path, info.step, began + time_left_s - time.monotonic())
        if self.archive is not None and info.resumable:
            self.archive.deliver(result.path, info.step, began + time_left_s - time.monotonic())
        return result

    def _root(self, directory: Path) -> Path:
        """`directory` as it was resolved at the start."""
        return self._resolved.get(directory, directory)

    def _state(self, *, copy: bool = False) -> Any:
        """The state of the last boundary. Without a `copy`, in host memory, it must not change until it is written."""
        with self.collector.devices.reading():
            state = self.collector.state()
            return to_host(state) if copy else state

    def _path(self, policy: ExitPolicy, position: Position) -> Path:
        if policy.place is None:
            return self.folder(policy.directory) / policy.name(position)
        return policy.place(self._root(policy.directory), position, self.ranks)

    def _finish(self, policy: ExitPolicy, path: Path, timeout_s: float) -> Path:
        if policy.finish is None:
            return path
        try:
            return policy.finish(path, self.ranks, self.gone, timeout_s)
        except OSError as error:
            logger.warning("%s is durable, but could not be moved to its final folder: %s", path, error)
            return path

    def save_periodic(self, policy: PeriodicPolicy) -> bool:
        """Write the boundary just reached. A failure is logged and training goes on; returns whether it succeeded.

        With ``policy.asynchronous`` only the copy to host memory happens here; a failure shows up in the log and the
        events.
        """
        began = time.monotonic_ns()
        try:
            return self._save_periodic(policy)
        finally:
            cost_ns = time.monotonic_ns() - began
            self._stall_ns += cost_ns
            self.page.set(stall_ns=self._stall_ns)
            if isinstance(policy, PeriodicSave):
                policy.note_cost(cost_ns / 1e9)

    def _save_periodic(self, policy: PeriodicPolicy) -> bool:
        position = self.collector.position
        path = self.folder(policy.directory) / policy.name(position)
        info = self._info(position, kind="periodic", reason="periodic", append_info=policy.append_info)

        def write(state: Any) -> None:
            self._write_once(policy, path, state, info)
            self.prune(policy)

        def begin() -> None:
            self._queue.reserve()  # before the copy is made: a third one has no room in memory
            try:
                state = self._state(copy=True)
                self._queue.submit(lambda: self._attempt(info, lambda: write(state)))
            except BaseException:
                self._queue.give_up()
                raise

        return self._attempt(info, begin if policy.asynchronous else lambda: write(self._state()))

    def _write_once(
        self, policy: ExitPolicy | PeriodicPolicy, path: Path, state: Any, info: CheckpointInfo
    ) -> SaveResult:
        """Write a save for which the ranks agree on nothing: this rank's share, if the policy wants each part once."""
        together = self.together
        if together is None or not getattr(policy, "remove_redundancy", False):
            return self._write(path, state, info)
        flat = flatten(state)
        return self._write(path, state, info, held=together.share(together.part.single, *flat), flat=flat)

    def _attempt(
        self,
        info: CheckpointInfo,
        save: Callable[[], object],
        remedy: str = "training goes on, older checkpoints are untouched",
    ) -> bool:
        """Save. A failure is logged and recorded, and training goes on; returns whether it succeeded."""
        try:
            save()
        except Exception as error:
            expected = isinstance(error, (SaveError, UnsupportedStateError, OSError))
            logger.error("step %d: %s; %s", info.step, error, remedy, exc_info=not expected)
            self.events.emit("save", step=info.step, reason=info.reason, outcome=f"failed: {error}", kind=info.kind)
            return False
        return True

    def save_to(self, path: Path | None, directory: Path, prefix: str, reason: str) -> SaveResult:
        """Write the boundary because the user asked; retention never deletes it. Raises SaveError."""
        position = self.collector.position
        name = f"{prefix}-{position.epoch}_{position.step_in_epoch}.safetensors"
        info = self._info(position, kind="manual", reason=reason, append_info=())
        state = self._state()
        before = self.newest
        result = self._write(self.folder(directory) / name if path is None else path, state, info)
        if path is not None:
            self.newest = before  # no start looks there
        return result

    def save_final(self, policy: ExitPolicy) -> bool:
        """Write the last boundary of a finished training. A failure is logged; returns whether it succeeded."""
        assert policy.final_name is not None
        position = self.collector.position
        path = self.folder(policy.directory) / policy.final_name(position)
        info = self._info(position, kind="final", reason="end of the training", append_info=policy.append_info)

        def write() -> None:
            result = self._write_once(policy, path, self._state(), info)
            logger.info("step %d, the end of the training, saved in %s", info.step, result.path)

        return self._attempt(info, write, "the training has ended well; older checkpoints are untouched")

    def delete(self, entry: CatalogEntry) -> None:
        """Remove an old checkpoint of this run, here and where it was copied to. A failure is a warning."""
        path, header = entry.path, entry.header
        try:
            os.unlink(path)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be deleted (%s)", path, error)
            return
        if self.mirror is not None:
            self.mirror.drop(path, self.events.run_id)
        if self.archive is not None and header is not None:
            self.archive.drop(header.info.moment, header.digest)

    def prepare(self, *, asynchronous: bool) -> None:
        """Main thread, at entry: get the memory and the threads that saves will need, while they are available."""
        try:
            num_tensors, device = len(self.collector.parameters), self.collector.devices.device
            self.reserve = Reserve(num_tensors, self.expected_bytes, device=device)
            if asynchronous:
                self._queue.start()
        except (OSError, RuntimeError, MemoryError) as error:
            logger.warning("memory and a thread for a dying save cannot be reserved (%s)", error)

    def make_room(self, num_tensors: int) -> None:
        """Training thread: reserve the memory that a save of so many tensors needs."""
        try:
            if self.reserve is not None:
                self.reserve.make_room(num_tensors)
        except OSError as error:
            logger.warning("memory for a dying save of %d tensors cannot be reserved (%s)", num_tensors, error)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for the background saves; False when they were not done in `timeout_s` seconds."""
        return self._queue.drain(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the background saves and for copies, `timeout_s` seconds at most, and end their thread."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._queue.close(timeout_s)
        if self.reserve is not None:
            self.reserve.close()
        if self.mirror is not None:
            self.mirror.finish(None if timeout_s is None else max(0.0, end - time.monotonic()))
        if self.archive is not None:
            self.archive.finish(None if timeout_s is None else max(0.0, end - time.monotonic()))

    def describe(self, kind: str) -> CheckpointInfo:
        """The header facts of the last boundary."""
        return self._info(self.collector.position, kind=kind, reason=kind, append_info=())

    def keep_unsaved(self, step: int, timeout_s: float) -> None:
        """A dying save of boundary `step` has failed: keep it in shared memory. The caller holds the update gate."""
        try:
            if self.keep_in_memory(max(0.0, timeout_s)):
                logger.warning("step %d is kept in shared memory, where the next start on this machine finds it", step)
        except Exception as error:  # the save has failed already, and the job must leave in time
            logger.error("step %d could not be kept in shared memory either: %s", step, error, exc_info=True)

    def _info(self, position: Position, *, kind: str, reason: str, append_info: Sequence[object]) -> CheckpointInfo:
        correct = self.collector.forecast_correct  # whether the boundary came out as forecast; None: there was none
        return CheckpointInfo(
            run_id=self.events.run_id,
            world_size=self.ranks.world_size,
            rank=self.ranks.rank,
            step=position.step,
            epoch=position.epoch,
            step_in_epoch=position.step_in_epoch,
            batch_num=position.batch_num,
            reason=reason,
            kind=kind,
            created=time.time(),
            resumable=kind != "eval",  # an evaluation's file holds weights and nothing else
            attempt=self.events.attempt,
            coordinates={
                **self.coordinates,
                **self.collector.weight_samples,
                **({} if correct is None else {"foreseen": int(correct)}),
            },
            append_info=tuple(append_info),
            torch_version=torch.__version__,
            flags=self.flags.identities,
            names=self.names,
            unmanaged=self._unmanaged.notes,
            not_kept=self._unmanaged.not_kept,
            certificate=self._unmanaged.certificate,
        )

    def _write(
        self,
        path: Path,
        state: Any,
        info: CheckpointInfo,
        also: Sequence[Path] = (),
        finish: Callable[[Path], Path] = lambda path: path,
        dying: bool = False,
        held: Held | None = None,
        flat: Flat | None = None,
    ) -> SaveResult:
        def before_publish(temp: Path) -> None:
            if dying and not self.collector.devices.still_holds:  # a background save has its own copy
                raise DeviceWentOnError(f"the device has gone on from step {info.step} while it was read")

        def write() -> SaveResult:
            for target in (path, *also):
                make_directory_durable(target.parent)
            with self.collector.devices.reading(dying=dying):
                return write_checkpoint(
                    path,
                    state,
                    info,
                    layout=self.collector.layout(),
                    also=also,
                    before_publish=before_publish,
                    reserve=self.reserve if dying else None,
                    held=held,
                    flat=flat,
                    cached=self._page_cache,
                )

        try:
            result = write()
        except OSError as error:  # a SaveError is one
            if error.errno != errno.ENOENT:
                raise
            result = write()  # another rank has renamed a tree that looked finished to it
        moved = [finish(name) for name in dict.fromkeys((path, *also))]
        result = result._replace(path=moved[0])
        self.newest_step = max(self.newest_step, info.step)
        speed = result.nbytes / max(result.duration_s, 1e-6)
        self.bytes_per_s = speed if self.bytes_per_s is None else min(speed, self.bytes_per_s)
        self.events.emit(
            "save",
            step=info.step,
            reason=info.reason,
            duration_s=result.duration_s,
            nbytes=result.nbytes,
            outcome="saved",
            path=str(result.path),
            kind=info.kind,
        )
        if info.resumable:
            self.newest = (info.step, result.path)
            self._nbytes += result.nbytes
            self.page.set(durable_step=info.step, durable_ns=time.monotonic_ns(), durable_bytes=self._nbytes)
        if self.mirror is not None and not dying:
            self.mirror.submit(result.path, info.step)
        if self.archive is not None and info.resumable and not dying:
            self.archive.submit(result.path, info.step)
        return result

    def prune(self, policy: PeriodicPolicy) -> None:
        """Delete what the policy no longer keeps: only files that it wrote itself, in this run and on this rank.

        Two policies may share a directory, and neither may count or delete the other's files, let alone those of
        `guard.save`. Called after each save, and at the end, when the other ranks have had time to finish theirs.
        """
        if policy.keep_max is None and policy.keep_per_n_minutes is None:
            return
        folder = self.folder(policy.directory)
        root = self._root(policy.directory)
        known = self._entries.get(root, ())
        entries = self._entries[root] = read_entries(root, known=known, owners=self.trust.of(root))
        own: dict[Moment, list[CatalogEntry]] = {}
        created: dict[Moment, float] = {}
        for entry in entries:
            info = entry.info
            is_own = info is not None and (info.run_id, info.rank) == (self.events.run_id, self.ranks.rank)
            if info is not None and is_own and entry.path.parent == folder and _is_of(policy, entry.path, info):
                own.setdefault(info.moment, []).append(entry)
                created[info.moment] = max(info.created, created.get(info.moment, -math.inf))
        doomed = choose_deletions(
            created,
            keep_max=policy.keep_max,
            keep_per_n_minutes=policy.keep_per_n_minutes,
            protect=self._protected(policy, entries, sorted(own)),
        )
        for entry in (each for moment in doomed for each in own[moment]):
            self.delete(entry)

    def _protected(self, policy: PeriodicPolicy, entries: Sequence[CatalogEntry], own: Sequence[Moment]) -> set[Moment]:
        """The newest complete step, the step just written, and those that may become complete yet.

        `newest_complete` judges it as a start would, from the files alone. The other ranks may lag: by one
        save, or with background saves by two (one being written, one waiting or being made); one more than that of the
        newest own steps stay as long as they are not complete. Where the other ranks' folders cannot be seen
        (node-local disks) none ever is.
        """
        whole = newest_complete(entries, self.events.run_id)
        behind = [moment for moment in own if whole is None or moment > whole]
        kept = {*own[-1:], *behind[-4 if policy.asynchronous else -2 :]}
        return kept if whole is None else {*kept, whole}


def _is_of(policy: PeriodicPolicy, path: Path, info: CheckpointInfo) -> bool:
    """Whether `policy` wrote the file: it is periodic and has, or had, the name that the policy gives its position."""
    name = policy.name(Position(info.step, info.epoch, info.step_in_epoch, info.batch_num))
    return info.kind == "periodic" and path.name in (name, previous_path(name).name)
