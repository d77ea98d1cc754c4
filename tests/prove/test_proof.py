"""Proofs of a real script with one fault, each with the words that must name it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindx_elastic.agent import zygote
from mindx_elastic.prove.proof import ProofReport, choose_stops, prove
from mindx_elastic.prove.records import WitnessedStep
from mindx_elastic.prove.runs import Command, Runs
from tests.fork_server import ForkedProcess
from tests.harness import JOBS, unignore_signals


@contextmanager
def make_runs() -> Iterator[Runs]:
    unignore_signals()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("MINDX_", "MS_", "TORCHELASTIC", "PYTHONHASH"))]:
            patch.delenv(name)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with Runs(Command(script=()), timeout_s=600) as made:
            yield made


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """The processes that fork are shared, and forked themselves; each proof gets its own chains of runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedProcess}))
        with make_runs() as made:
            yield made


def prove_job(runs: Runs, *words: object, stops: int | None = 4, steps: int = 0, seed: int = 0) -> ProofReport:
    runs.command = Command(script=tuple(map(str, words)))
    return prove(runs, stops=stops, steps=steps, seed=seed)


def prove_fault(runs: Runs, tmp_path: Path, fault: str, **more: int) -> ProofReport:
    proof = prove_job(runs, JOBS / "proved.py", fault, tmp_path / "ckpt", **more)
    assert not list(tmp_path.iterdir()), "the user's directory is left alone"
    return proof


def text_of(proof: ProofReport) -> str:
    """The first difference, with its cause and remedy."""
    row = next(row for row in proof.rows if row.outcome != "equal")
    return "\n".join([*(row.explained.lines if row.explained else []), *row.lines])


def test_an_exact_script_is_proved(runs: Runs, tmp_path: Path) -> None:
    proof = prove_fault(runs, tmp_path, "exact", stops=2)
    assert proof.exit_code == 0, text_of(proof)
    assert (proof.steps, proof.has_ended, proof.num_ranks) == (24, True, 1)
    stopped = proof.rows[2:]
    assert len(stopped) == 2 and all(row.resumed is not None for row in stopped)
    assert [row.name for row in stopped] == [f"stopped after step {row.resumed}" for row in stopped]
    assert not runs.is_fresh, runs.why_fresh
    # Its other faults sleep: in its source a counter of its own sets the learning rate.
    assert all("own_steps" in note for note in proof.notes), proof.notes


@pytest.mark.drill
@pytest.mark.parametrize("kept", ["freeze", "buffer", "prefetch", "evaluates"])
def test_what_the_guard_keeps_is_equal(runs: Runs, tmp_path: Path, kept: str) -> None:
    """Flags, buffers that are not persistent, batches that were fetched ahead, draws between two epochs."""
    proof = prove_fault(runs, tmp_path, kept, stops=3)
    assert proof.exit_code == 0, text_of(proof)
    assert "stopped after step 12" in [row.name for row in proof.rows], "the end of an epoch"


FAULTS = [  # the words for other differences: test_causes
    ("draw", "began with another torch stream", "code after step_end()", "guard.outside_step()"),
    ("never", "the run never resumed: it was stopped after step 1", 'resume="never"', 'resume="auto"'),
    ("counter", "the resumed one went on for 12 steps too many", "does not read its position", "guard.epochs(n)"),
    ("moves", "never resumed", "its directory is another one each time", "the same directory at each start"),
    ("best", "every step is equal, and the weights differ with which the script ends: model", "a variable", "stateful"),
]


REFUSED = ("draw", "counter")
"""By themselves the guard refuses these; told to, it warns of them only."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("fault", "what", "cause", "remedy"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_named(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, what: str, cause: str, remedy: str
) -> None:
    if fault in REFUSED:
        monkeypatch.setitem(runs.environment, "MINDX_UNMANAGED", "warn")
    proof = prove_fault(runs, tmp_path, fault)
    assert proof.exit_code == 1, proof.rows
    text = text_of(proof)
    assert what in text and cause in text and remedy in text, text


@pytest.mark.drill
@pytest.mark.parametrize(
    ("fault", "what", "cause"),
    [
        ("chance", "weights differ when the guard was entered: model.0.bias", "a generator that was not seeded"),
        ("late_chance", "not deterministic: weights differ after step 5: model.4.weight", "gives other bits each time"),
    ],
)
def test_a_script_that_is_not_deterministic_is_named(
    runs: Runs, tmp_path: Path, fault: str, what: str, cause: str
) -> None:
    proof = prove_fault(runs, tmp_path, fault)
    assert proof.exit_code == 3
    text = text_of(proof)
    assert what in text and cause in text, text
    assert len(proof.rows) == 2, "nothing is stopped then"


@pytest.mark.drill
def test_a_script_that_depends_on_the_order_of_hashes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two processes that fork were started with different seeds; forked ones would have this process's."""
    monkeypatch.setattr(zygote, "subprocess", subprocess)
    with make_runs() as runs:
        proof = prove_fault(runs, tmp_path, "hashes")
    assert proof.exit_code == 3
    text = text_of(proof)
    assert "not deterministic: the batch of step 1 is another one" in text and "Python's hashes differ" in text, text


def test_a_script_that_fails(runs: Runs, tmp_path: Path) -> None:
    proof = prove_fault(runs, tmp_path, "crash")
    assert proof.exit_code == 4 and len(proof.rows) == 1
    text = text_of(proof)
    assert "the uninterrupted run fails with exit code 1: RuntimeError: the disk with the data is not there" in text


def test_a_resumed_run_that_is_refused(runs: Runs, tmp_path: Path) -> None:
    proof = prove_fault(runs, tmp_path, "refused_later", stops=1)
    assert proof.exit_code == 1, "the uninterrupted run was not"
    assert "the resumed run is refused: the queue is not named" in text_of(proof)


def test_a_script_without_a_guard(runs: Runs, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('no guard')")
    proof = prove_job(runs, script)
    assert proof.exit_code == 4
    assert "the script has entered no guard" in text_of(proof)


@pytest.mark.drill
def test_scalars_that_vary_are_left_out_and_said(runs: Runs, tmp_path: Path) -> None:
    proof = prove_fault(runs, tmp_path, "timed")
    assert proof.exit_code == 0, text_of(proof)
    assert any("not compared, because it differs in each run: seconds" in note for note in proof.notes)


def test_a_proof_without_a_stop_is_not_equal(runs: Runs, tmp_path: Path) -> None:
    proof = prove_fault(runs, tmp_path, "exact", stops=3, steps=1)
    assert proof.exit_code == 4 and len(proof.rows) == 3
    assert "the runs have no boundary to stop at: the proof is 1 step long" in text_of(proof)
    assert "Give --steps 2 or more" in text_of(proof)


def test_stops_are_chosen_by_seed_and_meet_the_ends() -> None:
    places = [
        WitnessedStep(series=0, number=n, epoch=1 + (n - 1) // 8, step_in_epoch=1 + (n - 1) % 8) for n in range(1, 21)
    ]
    numbers = [number for _, number in choose_stops(places, 5, seed=0, has_ended=True)]
    assert len(numbers) == 5 and {1, 8, 20} <= set(numbers)
    assert numbers == sorted(numbers)
    assert choose_stops(places, 5, seed=0, has_ended=True) == choose_stops(places, 5, seed=0, has_ended=True)
    assert choose_stops(places, 5, seed=1, has_ended=True) != choose_stops(places, 5, seed=0, has_ended=True)
    assert len(choose_stops(places, None, seed=0, has_ended=False)) == 19
    assert choose_stops(places, 1, seed=0, has_ended=False)[0][1] < 20
    assert choose_stops(places[:1], 3, seed=0, has_ended=False) == []
    one_epoch = [replace(place, epoch=1) for place in places]
    assert {1, 20} <= {number for _, number in choose_stops(one_epoch, 3, seed=0, has_ended=True)}
    for stops, ends in ((2, {20}), (3, {20, 8}), (4, {20, 8, 1})):
        assert ends <= {number for _, number in choose_stops(places, stops, seed=0, has_ended=True)}
        by_seed = [set(choose_stops(places, stops, seed=seed, has_ended=True)) for seed in range(5)]
        assert len(set.union(*by_seed)) > stops, "one is chosen by the seed"
