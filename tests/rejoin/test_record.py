"""What is written of a recovery in place, read back, and shown."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.rejoin.record import (
    IN_PLACE,
    RESTART,
    SPARE,
    STOPPED,
    RecoveryRecord,
    Replacement,
    as_event,
    as_lines,
    from_event,
)


def recovery(**changes: Any) -> RecoveryRecord:
    facts: dict[str, Any] = {
        "attempt": 0,
        "generation": 3,
        "outcome": IN_PLACE,
        "cause": "killed by SIGKILL",
        "ranks": (1,),
        "stood_in": (Replacement(rank=1, pid=471, by=SPARE),),
        "donor": 0,
        "step": 12,
        "steps_lost": 0,
        "duration_s": 0.135,
    }
    return RecoveryRecord(**{**facts, **changes})


def test_a_line_each() -> None:
    assert as_lines([]) == []
    failed = recovery(outcome=RESTART, reason="rank 0: \x1b[31mfull" + "x" * 200, step=None)
    said = as_lines([recovery(), failed, recovery(outcome=STOPPED)])
    assert said[1] == "0.3  rank 1: killed by SIGKILL; a spare stands in; on from step 12; 135 ms"
    assert said[2].startswith(r"0.3  rank 1: killed by SIGKILL; not in place: rank 0: \x1b[31mfull")
    assert len(said[2]) < 210 and said[3].endswith("; stopped meanwhile")


_number = st.integers(0, 2**40)
_text = st.text(min_size=1)


@given(
    st.builds(
        RecoveryRecord,
        attempt=_number,
        generation=_number,
        outcome=st.sampled_from([IN_PLACE, RESTART, STOPPED]),
        cause=_text,
        ranks=st.lists(_number, max_size=5).map(tuple),
        stood_in=st.lists(st.builds(Replacement, rank=_number, pid=_number, by=_text), max_size=5).map(tuple),
        behind=st.lists(_number, max_size=5).map(tuple),
        donor=st.none() | st.integers(-1, 2**40),
        step=st.none() | _number,
        steps_lost=st.none() | _number,
        duration_s=st.none() | st.floats(0, 1e9),
    )
)
def test_whatever_is_recorded_comes_back(record: RecoveryRecord) -> None:
    if record.outcome != IN_PLACE:
        object.__setattr__(record, "reason", "why")
    line = json.loads(json.dumps({"attempt": record.attempt, **as_event(record)}))
    assert from_event(line) == record
    assert as_lines([record])


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from([*as_event(recovery()), "time", "attempt"]), _junk))
def test_a_line_that_makes_no_sense_is_none(line: dict[str, Any]) -> None:
    found = from_event({"attempt": 0, "generation": 1, "outcome": IN_PLACE, **line})
    if found is not None:
        as_lines([found])
