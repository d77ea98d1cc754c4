"""Saves the last boundary of a training that has ended by itself.

The program may fail after the block (in an evaluation, an export), and another rank may still be killed. The same
command then finds every step done and runs only what comes after the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.stop_step import CANNOT
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.core.events import logger
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.policy import ExitPolicy
from mindx_elastic.guard.saver import Saver
from mindx_elastic.resume.restore import Resumed

__all__ = ["check_guests_path", "keep_last_boundary", "say_that_a_guest_saves_nothing"]

_ALL_SAVED_S = 5.0  # the others have ended at the same step and write as much


def keep_last_boundary(
    saver: Saver, gate: UpdateGate, exchange: Exchange, policies: Sequence[ExitPolicy], durable: Path | None
) -> bool:
    """Save the last boundary if one of `policies` wants that and no file has it yet. Returns whether it is on disk.

    Training thread, at the end of the block, once no stop can follow. A failure is logged and not raised. `durable`:
    the file that this run was resumed from or has stopped with, if it is of the last boundary.
    """
    policy = next((p for p in policies if p.save and p.final_name is not None), None)
    step = saver.collector.position.step
    if durable is None and saver.newest is not None and saver.newest[0] == step:
        durable = saver.newest[1]  # a periodic save
    saved = durable is not None
    if policy is not None and step > 0 and not saved:
        saved = _save(saver, gate, policy)
    _drop_older(saver, exchange, policy, f"final/{step}", step if saved else CANNOT)
    return saved


def _save(saver: Saver, gate: UpdateGate, policy: ExitPolicy) -> bool:
    with gate.hold(0.05) as problem:
        if problem is None:
            return saver.save_final(policy)
    step = saver.collector.position.step
    # An average that is updated after the last step belongs into the block; nothing is wrong with the training then.
    logger.log(
        logging.INFO if gate.state is GateState.CLEAN else logging.WARNING,
        "step %d, the end of the training, is not kept: %s. The training is not affected; the same command begins at "
        "the newest checkpoint that is there and trains the same weights again. To have the end on disk, change "
        "weights after the guard's block, or call guard.save() right after the last guard.step_end()",
        step,
        problem,
    )
    saver.events.emit("save", step=step, reason=problem, outcome="refused: state is not at a boundary", kind="final")
    return False


def _drop_older(saver: Saver, exchange: Exchange, policy: ExitPolicy | None, name: str, offer: int | str) -> None:
    """Delete this rank's older final files once every rank has this step on disk."""
    older = [] if policy is None or offer == CANNOT else saver.older_finals(policy)
    if not older:
        exchange.announce(name, offer)  # the others may be waiting
    elif exchange.decide(name, offer, _ALL_SAVED_S).step == offer:
        for path in older:
            saver.delete(path)


def say_that_a_guest_saves_nothing(directory: Path, found: Resumed, targets: Mapping[str, object]) -> None:
    """Warn that a guard without a training (see `guard.start`) saves nothing in the directory of a training.

    The training's next start would take such a file for its own newest one, and state would be missing in it.
    """
    missing = sorted(found.checkpoint.state.keys() - targets.keys() - set(RESERVED_NAMES))
    logger.warning(
        "%s belongs to a training, and this guard has no optimizer and lacks %s: nothing is saved here, neither at "
        "the end nor on a stop. If this program trains too, give it a directory of its own, with resume=%r",
        directory,
        ", ".join(missing),
        str(found.path),
    )


def check_guests_path(path: str | Path | None, directories: Iterable[Path]) -> None:
    """Raise UsageError where a start in one of the guard's `directories` would find the file `path`."""
    folder = None if path is None else Path(path).parent.resolve()
    for directory in directories:
        if folder is None or folder.is_relative_to(directory.resolve()):
            raise UsageError(
                f"{directory} belongs to a training, which would go on from this file and not find all of its state "
                "there; save it elsewhere: guard.save(path=...)"
            )
