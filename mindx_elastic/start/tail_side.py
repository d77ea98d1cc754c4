"""All ranks go on from the same side of the code after an epoch.

That code belongs to the epoch's last boundary, which is copied once more after it (`capture.loop_ends`). Ranks do not
finish it together: one is killed in it when the others are in the next epoch already. What is there of it then is
in front of that code, so it runs that code again; if it has collectives (a sum over the ranks, an evaluation through
DDP), it would wait in them alone, or take part in those of the next step. So where the sides differ, all go back.

A rank whose code has changed weights cannot go back. Then a killed rank goes on after that code as its donor does;
what the code has done to its own small state is missing, and a warning names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.loop_ends import CHANGES_WEIGHTS, front_of
from mindx_elastic.core.events import logger
from mindx_elastic.core.ports import Risks
from mindx_elastic.core.printable import listed
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.start.restore import Resumed

__all__ = ["TailSide"]

_IN_FRONT, _AFTER, _STAYS = "in front", "after", "stays after"
_BACK, _ON = "back", "on"


class TailSide(Part):
    """On which side of that code `found` is on this rank, and from which one all ranks go on."""

    name = "tail"

    def __init__(self, found: Resumed) -> None:
        """Raises CorruptCheckpointError."""
        self._found = found
        self._own = None if found.own is None or found.plan.resharded else found.own.unpack()
        if self._own is None:
            loop = _loop_of(found.checkpoint.state)  # perhaps the donor's: this rank goes on like it
        else:
            loop = {} if found.own is not None and found.own.forecast else _loop_of(self._own)
        front = front_of(loop)
        are_lost = self._own is None and front is not None and front.get(CHANGES_WEIGHTS)  # the weights are the donor's
        self._said = _IN_FRONT if front is None else _STAYS if are_lost else _AFTER
        self._way = ""
        self._in_front: Sequence[int] = ()
        self._stay: Sequence[int] = ()

    def say(self) -> Any:
        return self._said

    def merge(self, said: Sequence[Any]) -> Merged:
        """Where the sides differ: the ranks in front of that code, and those that stay after it."""
        in_front, stay = ([rank for rank, each in enumerate(said) if each == side] for side in (_IN_FRONT, _STAYS))
        return Merged([in_front, stay] if len(in_front) < len(said) else [[], []])

    def hear(self, answer: Answer) -> None:
        self._in_front, self._stay = ([int(rank) for rank in ranks] for ranks in answer.common)
        if self._in_front and self._stay:
            self._way = _ON
        elif self._in_front:
            self.go_back()

    def go_back(self) -> None:
        """Some ranks are in front of that code."""
        self._way = _BACK

    def tell(self, collector: Collector, risks: Risks, *, leads: bool) -> None:
        """What it means for this run. `leads`: this rank speaks for all."""
        epoch = self._found.checkpoint.info.epoch
        if self._way == _ON:
            risks.risk(
                f"the code after epoch {epoch} has changed weights on {rank_list(self._stay)}, which cannot go back "
                f"in front of it, and {rank_list(self._in_front)} had not finished it: what it does to the other "
                "state of a rank is missing there, or done twice",
                "Change weights in steps, or in front of guard.step_end()",
            )
        if self._way == _BACK and self._in_front and leads:
            logger.info("the code after epoch %d runs again on all ranks: not all had finished it", epoch)
        if self._way == _BACK and self._said == _AFTER and (slow := collector.slow_objects()):
            risks.risk(
                f"all ranks go back in front of the code after epoch {epoch}, and {listed(slow, 3)} may be as that "
                "code left them: too slow to copy at every boundary",
                "Let that code leave them alone",
            )

    def state(self, collector: Collector) -> dict[str, Any]:
        """The state of `found` on the side from which all go on."""
        state: dict[str, Any] = self._found.checkpoint.state
        front = front_of(_loop_of(state)) if self._way == _BACK else None
        return state if front is None else collector.compose(state, {**front})

    def own(self) -> tuple[dict[str, Any] | None, bool]:
        """The same of this rank's own small state, where it takes a donor's `state`; None: nothing is known of it. And
        whether that is all of it."""
        own = self._own
        is_whole = own is not None and self._found.own is not None and not self._found.own.forecast
        if own is None or not self._way:
            return own, is_whole
        if self._way == _ON and self._said == _IN_FRONT:  # a learning rate must be the same on all ranks
            return {name: value for name, value in own.items() if name not in ("progress", "plain", "groups")}, False
        front = front_of(_loop_of(own))
        return (own if front is None or self._way == _ON else {**front}), is_whole


def _loop_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    loop = state.get("progress", {}).get("loop", {})
    return loop if isinstance(loop, Mapping) else {}
