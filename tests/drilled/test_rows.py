"""Which faults share a job, and what of the job belongs to which of them."""

from __future__ import annotations

import itertools
import random

from mindx_elastic.drill.drill import choose_faults
from mindx_elastic.drill.faults import Fault
from mindx_elastic.drill.rows import GAP, Start, divide, make_rows
from mindx_elastic.prove.records import Life, Step

PLACES = [(guard, step) for guard in (0, 1) for step in range(1, 40)]


def test_rows_keep_all_faults_in_the_order_in_which_they_happen() -> None:
    for seed in range(20):
        faults = choose_faults(
            PLACES, ranks=2, agent=True, workers=True, copies={0: PLACES, 1: PLACES}, number=60, seed=seed
        )
        rows = make_rows(faults, 8)
        assert sorted(map(str, faults)) == sorted(str(fault) for row in rows for fault in row)
        assert max(map(len, rows)) <= 8 and len(rows) < 30
        for row in rows:
            places = [(fault.guard, fault.boundaries_before) for fault in row]
            assert places == sorted(places)
            for (guard, step), (other, following) in itertools.pairwise(places):
                assert guard != other or following - step >= GAP
            assert all(fault.kind != "full-memory" for fault in row[1:]), "it begins with the process"


def test_one_fault_a_row_leaves_the_order_alone() -> None:
    faults = [Fault(kind="kill", step=step) for step in random.Random(0).sample(range(1, 30), 9)]
    assert make_rows(faults, 1) == [[fault] for fault in faults]


def life(rank: int, began: float, *steps: tuple[int, float], resumed: int | None = None) -> Life:
    made = [Step(series=0, number=number, clock=clock) for number, clock in steps]
    return Life(rank=rank, series=0, resumed=resumed, steps=made, clock=began)


def test_each_fault_answers_for_the_job_until_the_next_one() -> None:
    starts = [Start(code=143, fired=[0]), Start(code=-9, fired=[1, 3], left=["process 7"]), Start(code=0, fired=[])]
    lives = [
        life(0, 0.0, (1, 1.0), (2, 2.0)),
        life(0, 3.0, (3, 4.0), (4, 5.0), (5, 6.0), resumed=2),
        life(0, 8.0, (6, 9.0), resumed=5),
    ]
    notes = [{"clock": 2.5}, {"clock": 4.5}, None, {"clock": 6.5}]
    first, second, none, last = divide(notes, starts, lives)
    assert none is None and first is not None and second is not None and last is not None
    assert (first.codes, second.codes, last.codes) == ([143], [], [-9, 0])
    assert (first.left, second.left, last.left) == ([], [], ["process 7"])
    assert [share.is_last for share in (first, second, last)] == [False, False, True]
    numbers = [[[step.number for step in each.steps] for each in share.lives] for share in (first, second, last)]
    assert numbers == [[[1, 2], [3]], [[4, 5]], [[6]]], "each step belongs to one fault"
    until = [[[step.number for step in each.steps] for each in share.until] for share in (first, second, last)]
    assert until == [[[1, 2], [3]], [[1, 2], [3, 4, 5]], [[1, 2], [3, 4, 5], [6]]], "what was reached before it"
