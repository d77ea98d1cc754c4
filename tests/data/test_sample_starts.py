"""Where the streams begin for a sample: the same words in every way, others for each sample, no pattern."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core import mersenne
from mindx_elastic.data.permutation import mix
from mindx_elastic.data.sample_starts import (
    NUMPY,
    PYTHON,
    Start,
    make_start,
)

MASK = (1 << 64) - 1
STREAMS = [PYTHON, NUMPY]
SEEDS = st.integers(0, MASK)


@pytest.fixture(autouse=True)
def _keep_the_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def expected_words(stream: int, seed: int) -> list[int]:
    """As the description says, in plain numbers."""
    found: list[int] = []
    for pair in range(312):
        value = ((seed ^ mix(9, stream, pair)) * 0xFF51AFD7ED558CCD) & MASK
        value = ((value ^ (value >> 32)) * 0x94D049BB133111EB) & MASK
        value ^= value >> 29
        found += [value & 0xFFFFFFFF, value >> 32]
    return found


def words_of(stream: int) -> list[int]:
    """The words that come, in order; those before are not told."""
    if stream == PYTHON:
        _, (*words, index), gauss = random.getstate()
        assert gauss is None
        return list(words[index:])
    state: Any = np.random.get_state(legacy=False)
    assert not state["has_gauss"]
    found: list[int] = state["state"]["key"][state["state"]["pos"] :].tolist()
    return found


def drawn(stream: int, count: int) -> list[int]:
    if stream == PYTHON:
        return [random.getrandbits(32) for _ in range(count)]
    found: list[int] = np.random.randint(0, 1 << 32, size=count, dtype=np.uint32).tolist()
    return found


def use_up(stream: int) -> None:
    """Leaves a normal deviate behind."""
    if stream == PYTHON:
        random.gauss(0, 1)
    else:
        np.random.randn()


def started(stream: int, seeds: list[int]) -> Start:
    start = make_start(stream)
    start.prepare(seeds)
    return start


def ask_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mersenne, "_python_is_as_expected", lambda: False)
    monkeypatch.setattr(mersenne, "_gauss_offset", lambda: None)
    monkeypatch.setattr(mersenne, "_python", mersenne._PythonAccess(None))
    monkeypatch.setattr(mersenne, "_numpy", None)


@pytest.mark.parametrize("stream", STREAMS)
@settings(max_examples=20, deadline=None)
@given(seeds=st.lists(SEEDS, min_size=1, max_size=40))
def test_the_words_are_as_described(stream: int, seeds: list[int]) -> None:
    start = started(stream, seeds)
    for number, seed in enumerate(seeds):
        start.begin(number)
        assert words_of(stream) == expected_words(stream, seed)
        use_up(stream)
    assert start.fits()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("in_place", [True, False])
def test_by_the_libraries_functions_the_same(stream: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_place:
        ask_the_libraries(monkeypatch)
    seeds = [mix(number) for number in range(70)]
    start = started(stream, seeds)
    for number in range(70):  # more than are made at once
        start.begin(number)
        if number in (0, 1, 69):
            assert words_of(stream) == expected_words(stream, seeds[number])
        use_up(stream)
    drawn(stream, 2000)
    assert start.fits()


def test_another_bit_generator_is_seen_and_seeded() -> None:
    start = started(NUMPY, [5])
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
        assert not start.fits()
        other = started(NUMPY, [5])
        other.begin(0)
        first = np.random.rand()
        np.random.rand()
        other.begin(0)
        assert np.random.rand() == first
        assert other.fits()
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]
    assert not other.fits()


def test_another_generator_behind_pythons_functions_is_seen_and_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(random.Random):
        def getstate(self) -> Any:
            return 1, super().getstate()

    start, own = started(PYTHON, [5]), Own(4)
    for name in ("getstate", "setstate", "seed", "random"):
        monkeypatch.setattr(random, name, getattr(own, name))
    assert not start.fits()
    other = started(PYTHON, [5])
    other.begin(0)
    assert random.random() == random.Random(5).random()
    monkeypatch.undo()
    assert not other.fits()


# --- no pattern ---


def table(stream: int, seeds: list[int], count: int) -> Any:
    """Numbers below 1 of each sample, a row each."""
    start, rows = started(stream, seeds), []
    for number in range(len(seeds)):
        start.begin(number)
        rows.append(drawn(stream, count))
    return np.array(rows, dtype=np.float64) / 2.0**32


@pytest.mark.parametrize("stream", STREAMS)
def test_no_pattern_within_and_between_samples(stream: int) -> None:
    """Limits are those of 6 standard deviations, or of 1 in a million; the seeds are fixed."""
    samples, count = 2000, 96
    prefix = mix(3, 1, 2)
    seeds = [mix(3, 1, 2, index) for index in range(samples)]
    assert len({prefix, *seeds}) == samples + 1
    found = table(stream, seeds, count)
    z = (found - 0.5) * np.sqrt(12.0)
    assert abs(z.mean()) < 6 / np.sqrt(z.size)
    assert np.abs(z.mean(axis=0)).max() < 6 / np.sqrt(samples), "each place of a sample"
    assert np.abs(z.mean(axis=1)).max() < 6 / np.sqrt(count), "each sample"
    for lag in (1, 2, 3, 16):
        neighbours = (z[lag:] * z[:-lag]).mean(axis=0)
        assert np.abs(neighbours).max() < 6 / np.sqrt(samples - lag), f"samples {lag} apart"
        along = (z[:, lag:] * z[:, :-lag]).mean(axis=0)
        assert np.abs(along).max() < 6 / np.sqrt(samples), f"numbers {lag} apart"
    places = np.corrcoef(z.T) - np.eye(count)
    assert np.abs(places).max() < 6 / np.sqrt(samples), "any two places"
    bits = (found[:, :, None] * 2.0**32).astype(np.uint64) >> np.arange(32, dtype=np.uint64) & np.uint64(1)
    assert np.abs(bits.mean(axis=(0, 1)) - 0.5).max() < 3 / np.sqrt(found.size), "each bit"
    cells = np.bincount((found.ravel() * 256).astype(int), minlength=256)
    chi2 = float(((cells - found.size / 256) ** 2 / (found.size / 256)).sum())
    assert abs(chi2 - 255) < 6 * np.sqrt(2 * 255)


def test_numbers_are_not_repeated() -> None:
    """In no other sample, epoch, rank or stream: what each rank gets is another sample, and its seed another hash."""
    from mindx_elastic.data import ResumableLoader

    seeds = []
    for epoch in (1, 2):
        for rank in range(3):
            loader = ResumableLoader(list(range(60)), 4, shuffle=True, seed=5, rank=rank, world_size=3)
            loader.set_epoch(epoch)
            batches: Any = loader.batch_sampler
            seeds += [seed for keys in batches for seed, _ in keys]
    assert len(set(seeds)) == len(seeds) == 120
    words = np.concatenate([(table(stream, seeds, 624) * 2.0**32).astype(np.uint64) for stream in STREAMS])
    pairs = (words[:, 0::2] << np.uint64(32) | words[:, 1::2]).ravel()
    assert len(np.unique(pairs)) == pairs.size
