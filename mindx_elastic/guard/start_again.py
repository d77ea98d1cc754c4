"""Starts a guard that is entered again after a recovery in place, where all ranks hold the same state.

What to go on from is agreed on already (`rejoin.protocol`), so the ranks meet once, and not five times as in `start`:
when the state is back on every rank, and all process groups have their new connections. What a start has to know
earlier is known here:

* the directory that names the folder in shared memory: the survivors' reports say it (`Report.home`);
* the layouts of all tensors: those of the donor's file, or of this process before. The state is the same on all ranks,
  and so are the groups, or there would be no recovery in place.

All that the ranks tell each other at a start they tell each other here as well, because the new process knows none of
it. Files are not looked for: nobody reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindx_elastic.agreement.gather import Part, meet
from mindx_elastic.alarm.peers import PeerWatch
from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.strategy import LayoutRecord
from mindx_elastic.errors import MismatchError
from mindx_elastic.guard.compilation import CompiledPart, restore_compiled
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.directories import RankDirectories
from mindx_elastic.guard.reentry import ReentryPart
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.start import (
    AnsweredFlagsPart,
    FaultsPart,
    LoaderLengthsPart,
    PeersPart,
    Start,
    is_guest,
    load,
    tell,
)
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.rejoin.member import Entry

__all__ = ["start_again"]


def start_again(
    *,
    collector: Collector,
    targets: Mapping[str, Any],
    saver: Saver,
    around: Connections,
    unmanaged: Unmanaged,
    folders: RankDirectories,
    entry: Entry,
    last_parts: Callable[[], Sequence[Part]],
) -> Start:
    """Load, and meet the others. Main thread, all ranks together. `last_parts`: more for the meeting.

    Raises CorruptCheckpointError, MismatchError, and what `Collector.load` raises.
    """
    began, ranks = time.perf_counter(), saver.ranks
    plan = ReentryPart(entry, ranks, around.arenas, saver.trust, collector.module_names)
    plan.follow()
    found = plan.resumed
    assert found is not None
    info = found.checkpoint.info
    around.is_guest = around.evaluates or is_guest(targets, found, had_strategy=False)
    around.announce(found)
    saver.events.run_id, saver.events.attempt = plan.run_id, plan.attempt
    collector.compiled.only_names = collector.is_sharded
    layouts = LayoutRecord.from_json(found.checkpoint.layout).job if entry.live is None else entry.layouts
    collector.layouts.set_job_layouts(layouts)
    known = unmanaged.notes
    kept, restore = load(found, collector, ranks, unmanaged, with_flags=not around.is_guest)

    faults, peers, lengths = FaultsPart(), PeersPart(ranks), LoaderLengthsPart(targets)
    flags, compiled = AnsweredFlagsPart(saver.flags), CompiledPart(kept)
    flags.own = info.flags
    parts = [folders, faults, peers, lengths, *around.parts(), plan, flags, compiled, *last_parts()]
    meet(around.exchange, "again", parts)
    if folders.home != entry.home:
        raise MismatchError(
            f"this rank's directory is {folders.home}, and the ranks that live on have {entry.home}", path=folders.home
        )
    around.connect()
    if faults.known.report:
        saver.coordinates["fault_report"] = faults.known.report
    restore_compiled(targets, collector, kept, compiled.runs, unmanaged)
    tell(found, saver, began, entry, [note for note in unmanaged.notes if note not in known])
    saver.began_from(info)
    watch = PeerWatch(peers.identities, rank=ranks.rank)
    return Start(plan.run_id, plan.attempt, found, watch, restore, lengths.uneven)
