"""Which places have a worker: after any failures the job goes on with as many as it may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agent.places import NodePlaces, PlaceEnd, visible_devices


def failed(place: int, *, passed: bool = False) -> PlaceEnd:
    return PlaceEnd(place, failed=True, passed=passed, cause="exit code 3")


def test_a_place_in_which_a_later_process_of_the_attempt_got_on_is_not_lost() -> None:
    """Two were replaced in place, the second one before it passed a boundary, and the third one has trained."""
    places = NodePlaces(2, 1)
    assert not places.note_ends([failed(1, passed=True), failed(1), PlaceEnd(1, failed=False, passed=True)])
    assert not places.suspects
    assert not places.note_ends([failed(1), PlaceEnd(0, failed=False, passed=True)])
    assert places.note_ends([failed(1)]) == [1]


@given(
    count=st.integers(1, 16),
    least=st.integers(1, 16),
    lost=st.sets(st.integers(0, 15)),
    window=st.integers(0, 6),
    refusal=st.sampled_from(["", "the loader has its own order"]),
)
def test_a_choice_is_right_or_says_why_not(count: int, least: int, lost: set[int], window: int, refusal: str) -> None:
    least, lost = min(least, count), {place for place in lost if place < count}
    places = NodePlaces(count, least, dict.fromkeys(lost, "gone"))
    active, why_not = places.choose(refusal=refusal, window=window)
    assert bool(active) != bool(why_not)
    assert not set(active) & lost
    if not lost:
        assert active == tuple(range(count))
    elif active:
        assert not refusal
        size = len(active)
        assert least <= size <= count - len(lost)
        assert active == tuple(sorted(active))
        assert window
        assert count * window % size == 0
        assert not any(count * window % more == 0 for more in range(size + 1, count - len(lost) + 1))


def test_what_would_have_gone_on_is_said() -> None:
    places = NodePlaces(4, 3, lost={3: "killed"})
    assert places.choose()[1].endswith("among 3 ranks; --min-nproc 2 would go on with 2")
    assert places.choose(window=3) == ((0, 1, 2), "")


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=30))
def test_only_a_place_that_failed_twice_in_a_row_is_lost(ends: list[tuple[int, bool, bool]]) -> None:
    places = NodePlaces(4, 1)
    before: dict[int, bool] = {}
    for place, has_failed, passed in ends:
        found = places.note_ends([PlaceEnd(place, has_failed, passed)])
        assert (place in found) == (has_failed and not passed and before.get(place, False))
        if has_failed or passed:
            before[place] = has_failed


def test_the_devices_of_the_places_that_work() -> None:
    assert visible_devices((0, 1), 4, None, 4) is None  # local ranks 0 and 1 have devices 0 and 1 as they are
    assert visible_devices((0, 1, 3), 4, None, 4) == "0,1,3"
    assert visible_devices((1,), 2, "GPU-a, GPU-b", 0) == "GPU-b"
    assert visible_devices((1, 2), 3, None, 0) is None  # no GPU
    assert visible_devices((1, 2), 3, "0", 0) is None  # all ranks share one
