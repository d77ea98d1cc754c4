"""Witnesses of two runs that are made by hand, for the comparison and its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindx_elastic.prove.causes import explain
from mindx_elastic.prove.compare import Difference, Reference, compare_life
from mindx_elastic.prove.records import ProcessRecord, WitnessedStep

__all__ = ["PER_EPOCH", "REFERENCE", "begin", "difference", "end", "life", "step", "weights", "words"]

PER_EPOCH = 10


def weights(number: int) -> dict[str, str]:
    return {
        "weights|model.w": f"w{number}",
        "option|optimizer lr": "0.1",
        "optimizer|optimizer exp_avg of w": f"m{number}",
    }


def step(number: int, **changes: object) -> WitnessedStep:
    """Step `number` of an exact run: a stream's digest is the count of its numbers, 4 a step."""
    made = WitnessedStep(
        series=0,
        number=number,
        epoch=1 + (number - 1) // PER_EPOCH,
        step_in_epoch=1 + (number - 1) % PER_EPOCH,
        begin=begin(number),
        end=end(number),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def begin(number: int, **changes: str) -> dict[str, str]:
    """What step `number` begins with. `changes`: by kind."""
    made = {"stream|torch": str(4 * (number - 1)), "weights|model.w": f"w{number - 1}"}
    return _changed({**made, "option|optimizer lr": "0.1", "flag|model.training": "True"}, changes)


def end(number: int, **changes: str) -> dict[str, str]:
    """What step `number` ends with. `changes`: by kind."""
    made = {"stream|torch": str(4 * number), "scalar|loss": f"l{number}", "calls|model": "1"}
    return _changed({**weights(number), **made, "batch|model": f"x{number}"}, changes)


def _changed(sample: dict[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    return {key: changes.get(key.partition("|")[0], value) for key, value in sample.items()}


def life(
    steps: Sequence[WitnessedStep], *, resumed: int | None = None, outcome: str = "finished", rank: int = 0
) -> ProcessRecord:
    entered = weights(resumed or 0)
    return ProcessRecord(rank=rank, series=0, resumed=resumed, entered=entered, steps=list(steps), outcome=outcome)


REFERENCE = Reference(lives=[life([step(n) for n in range(1, 21)])])


def difference(*changed: WitnessedStep, resumed: int = 14, reference: Reference = REFERENCE) -> Difference:
    known = {each.number: each for each in changed}
    steps = [known.pop(n, step(n)) for n in range(resumed + 1, 21)]
    found = compare_life(reference, life([*steps, *known.values()], resumed=resumed))
    assert found is not None
    return found


def words(*changed: WitnessedStep, resumed: int = 14, reference: Reference = REFERENCE) -> str:
    return explain(difference(*changed, resumed=resumed, reference=reference)).what
