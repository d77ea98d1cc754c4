"""Which boundary a stop saves where the devices are behind the program: see `capture.device_progress`."""

from __future__ import annotations

from collections.abc import Callable

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.core.events import logger
from mindx_elastic.errors import UnsupportedStateError

__all__ = ["DeviceWentOnError", "choose_held_boundary"]


class DeviceWentOnError(OSError):
    """The device was slow, not stuck: what was read of an older boundary is worth nothing, and a newer one is there."""


def choose_held_boundary(
    collector: Collector, problem: str | None, gate: UpdateGate, waits: Callable[[], bool]
) -> str | None:
    """Before a save that a death may have brought: let the newest boundary count that the devices hold.

    The caller holds `gate`, which says `problem` (None: none). Waits for the devices for as long as ``waits()``.
    Returns why there is no such boundary; None: there is.
    """
    devices = collector.devices
    newest = devices.newest
    is_clean = gate.state is GateState.CLEAN
    if newest is None or (problem is not None and (is_clean or not devices.keeps_older)):
        return problem
    try:
        found = devices.newest_held(waits, has_updated=not is_clean)
    except RuntimeError as error:  # every later call of CUDA fails, too
        return f"the device has failed ({str(error).partition(chr(10))[0]})"
    if found is None and not devices.keeps_older:
        return problem  # the save waits for the device
    if found is None or (found is not newest and gate.unguarded):  # an update by hand has no mark
        return problem or f"the device has not come to the end of step {newest.step}, and holds no older boundary"
    if found is not newest or not is_clean or devices.has_gone_back:
        try:
            collector.go_back(found)
        except UnsupportedStateError as error:
            return str(error)
        if found is newest and is_clean:
            devices.hold(None)  # after an older one had counted: the device has come, and the gate keeps it here
    if found is not newest:
        logger.warning(
            "the device has not come to the end of step %d, where the program is; it still holds step %d, which counts",
            newest.step,
            found.step,
        )
    return None
