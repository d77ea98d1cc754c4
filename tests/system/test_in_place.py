"""Recoveries in place: whatever dies, wherever, the survivors keep their processes, and the end is bit for bit that of
the undisturbed run; or the job is restarted, and says why. See ``jobs/in_place.py`` and ``jobs/programs.py``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.harness import Job, events, job_status, start_agent
from tests.system.conftest import Uninterrupted
from tests.system.nodes import End, end_of

pytestmark = pytest.mark.slow
drill = pytest.mark.drill

JOB = "in_place.py"
IN_PLACE = r"recovery \d+ in place: ranks? ([\d, ]+) replaced, all ranks train on from step (\d+)"
WHY = r"no recovery in place: (.*)"
RESTART = r"restart \d+ of"
PATIENT = ("--rejoin-timeout", "120")
"""The first death may come before the zygote is ready."""
PLAIN = {"--fault": 1, "--resources": 0, "--hold-at": 1, "--step-s": 1}
"""Options that do not change what is trained, and how many words follow."""
Meanwhile = Callable[[Job, Path], None]


class Runs:
    """Disturbed runs, each beside the undisturbed one of the same training."""

    def __init__(self, folder: Path, uninterrupted: Uninterrupted) -> None:
        self._folder, self._uninterrupted, self._count = folder, uninterrupted, 0

    def run(
        self,
        ranks: int,
        *args: object,
        options: Sequence[str] = PATIENT,
        env: Mapping[str, str] = MappingProxyType({}),
        meanwhile: Meanwhile = lambda job, folder: None,
        code: int = 0,
    ) -> tuple[Job, Path]:
        """Run it, and insist on the same end as without faults: weights, optimizer, random numbers, samples."""
        words = [str(each) for each in args]
        expected = self.undisturbed(ranks, words)
        folder = self.new_folder()
        job = self.start(folder, ranks, words, options, env, meanwhile, code)
        assert len(job.matches(r"^FAULT ")) == words.count("--fault"), job.report()
        if code == 0:
            assert end_of(job) == expected, job.report()
            assert not job.matches("not bit for bit"), job.report()
        return job, folder

    def new_folder(self) -> Path:
        self._count += 1
        return self._folder / f"run{self._count}"

    def undisturbed(self, ranks: int, words: Sequence[str]) -> End:
        """Of the same training without faults, and without an agent."""
        return end_of(self._uninterrupted(script_of(words), ranks, *_without_faults(words)))

    def start(
        self,
        folder: Path,
        ranks: int,
        args: Sequence[str],
        options: Sequence[str] = PATIENT,
        env: Mapping[str, str] = MappingProxyType({}),
        meanwhile: Meanwhile = lambda job, folder: None,
        code: int | None = 0,
    ) -> Job:
        """`code`: None: the agent is killed."""
        (folder / "shm").mkdir(parents=True, exist_ok=True)
        env = {"MINDX_ARENA_DIR": str(folder / "shm"), **env}
        options = ["--recover", "in-place", *options]
        with start_agent(
            script_of(args), folder, *args, ranks=ranks, options=options, env=env, run_dir=folder / "run"
        ) as job:
            meanwhile(job, folder)
            if code is None:
                return job
            job.expect(code)
            assert not list((folder / "shm").glob("*/agent-*")), job.report()
        return job


def script_of(words: Sequence[str]) -> str:
    return "programs.py" if "--form" in words else JOB


def _without_faults(words: Sequence[str]) -> list[str]:
    found, rest = [], iter(words)
    for word in rest:
        if word in PLAIN:
            for _ in range(PLAIN[word]):
                next(rest)
        else:
            found.append(word)
    return found


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory, uninterrupted: Uninterrupted) -> Runs:
    return Runs(tmp_path_factory.mktemp("in_place"), uninterrupted)


def faults(*orders: str) -> list[str]:
    return [word for order in orders for word in ("--fault", order)]


def victims(orders: Sequence[str]) -> list[int]:
    return [int(order.partition(":")[0]) for order in orders]


def check_in_place(job: Job, deaths: Sequence[int]) -> None:
    """Each death cost its own rank a process, and no other rank."""
    replaced = [int(rank) for match in job.matches(IN_PLACE) for rank in match[1].split(",")]
    assert sorted(replaced) == sorted(deaths), job.report()
    for rank, pids in job.processes().items():
        assert len(pids) == 1 + deaths.count(rank), job.report()
    assert not job.matches(WHY) and not job.matches(RESTART), job.report()


def check_restarted(job: Job, why: str, times: int = 1) -> None:
    assert any(why in match[1] for match in job.matches(WHY)), job.report()
    assert len(job.matches(RESTART)) == times, job.report()


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir(parents=True)
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size={size},mode=700 tmpfs {path}") != 0:
        pytest.skip("a file system of a given size needs root")
    try:
        yield
    finally:
        os.system(f"umount {path}")


# --- ranks that die ---

TWO = ("1:3:start", "0:4:forward", "1:6:mid", "0:8:backward", "1:10:update", "0:12:eval", "1:13:after", "0:15:save")


def test_two_ranks_killed_in_turn_at_every_place_of_a_step(runs: Runs) -> None:
    job, folder = runs.run(2, "--evaluate", "no_grad", "--save-every", 5, *faults(*TWO))
    check_in_place(job, victims(TWO))
    told = [event for event in events(folder / "run", "rejoin") if event["outcome"] == "in place"]
    assert len(told) == len(TWO)
    check_status(folder / "run", job, TWO)
    assert not any((folder / "shm").rglob("*.safetensors")), "shared memory is given back"


def check_status(run_dir: Path, job: Job, orders: Sequence[str]) -> None:
    """`mindx-elastic status` says what has happened."""
    document = job_status(run_dir)
    found, totals = document["recoveries"], document["totals"]
    assert [(each["outcome"], each["ranks"]) for each in found] == [("in place", [rank]) for rank in victims(orders)]
    for rank, pids in job.processes().items():
        assert [each["pid"] for one in found for each in one["stood_in"] if each["rank"] == rank] == pids[1:]
    assert {(each["cause"], each["reason"], each["steps_lost"]) for each in found} == {("killed by SIGKILL", "", 0)}
    assert not any(each["donor"] in each["ranks"] for each in found)
    assert (totals["failures"], totals["in_place"], totals["steps_lost"]) == (len(orders), len(orders), 0)
    assert totals["not_training_s"] == pytest.approx(sum(each["duration_s"] for each in found), abs=0.01)


@drill
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_rank_and_one_that_spins_are_replaced(runs: Runs, ranks: int) -> None:
    orders = (f"{ranks - 1}:4:mid:stop", "0:7:backward:spin")
    job, folder = runs.run(ranks, *faults(*orders), options=["--hang-timeout", "3"])
    check_in_place(job, victims(orders))
    document = job_status(folder / "run")
    for each in document["recoveries"]:
        assert each["cause"].startswith("hang: no step for ") and each["duration_s"] >= 3.0
    assert document["totals"]["not_training_s"] >= 6.0, "the time in which they were stuck counts"


@drill
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("orders", "dead"),
    [
        (("1:5:save", "0:10:save"), (1, 0)),
        (("0:5:save:next", "1:10:save:next", "0:15:save:next-now"), (1, 2, 1)),
    ],
    ids=["the dead rank's", "a survivor's"],
)
def test_while_a_save_is_written_beside_the_training(
    runs: Runs, ranks: int, orders: Sequence[str], dead: Sequence[int]
) -> None:
    """The survivor's save ends, whatever the recovery does meanwhile."""
    words = ("--epochs", 3, "--size", 48 * ranks, "--save-every", 5, "--save-beside")
    job, folder = runs.run(ranks, *words, *faults(*orders))
    check_in_place(job, [rank % ranks for rank in dead])
    assert len(list((folder / "ckpt").rglob("every-*.safetensors"))) == 2 * ranks


@drill
def test_fifty_recoveries_in_one_job_and_what_they_leave_behind(runs: Runs) -> None:
    """As docs/agent.md says: 3 threads and about 5 descriptors each, in the survivor. Then the cap is reached."""
    places = {step: ("start", "forward", "mid", "backward", "update")[step % 5] for step in range(3, 54)}
    # Once the other rank is at an epoch's end, what this one's loop variables were then is lost, and that is told.
    places |= dict.fromkeys((12, 24, 36, 48), "mid")
    orders = [f"1:{step}:{place}" for step, place in places.items()]
    words = ["--epochs", 5, "--resources", *faults(*orders)]
    job, folder = runs.run(2, *words, env={"MINDX_REJOIN_MOST": "50"})
    assert len(job.matches(IN_PLACE)) == 50, job.report()
    whys = {match[1].partition(";")[0] for match in job.matches(WHY)}
    assert whys == {"there were 50 in this attempt, and each leaves threads and descriptors behind"}, job.report()
    assert len(job.matches(RESTART)) == 1, job.report()
    pids = job.processes()
    assert (len(pids[0]), len(pids[1])) == (2, 52), "rank 0 is replaced by the restart alone"
    found = [tuple(map(int, m[1].split())) for m in job.matches(r"^RESOURCES 0 \d+ (\d+ \d+ \d+ \d+)$")]
    first, last, after = found[0], found[50], found[51]
    assert len(found) == 52, job.report()
    assert last[0] <= first[0] + 50 * 3 + 10, found
    assert last[1] <= first[1] + 50 * 6, found
    assert last[2] <= first[2] + 60_000, found
    # The first count is made before the slots of snapshots and the order of the gradients, for spares, are there.
    assert max(each[3] for each in found) <= found[1][3] + 2, [each[3] for each in found]
    assert after[0] < first[0] + 10 and after[1] < first[1] + 20, found
    assert not any((folder / "shm").rglob("*.safetensors"))


# --- others that die ---


def wait_for_spares(job: Job, number: int) -> list[int]:
    return [int(match[1]) for match in job.wait_for(r"a spare \(pid (\d+)\) waits", number)]


@pytest.mark.parametrize(
    ("late", "killed"),
    [(["--late-rank"], False), pytest.param([], False, marks=drill), pytest.param(["--late-rank"], True, marks=drill)],
    ids=["model built", "rank asked for at once", "another one was killed"],
)
def test_a_warm_spare_takes_a_dead_ranks_place(runs: Runs, late: Sequence[str], killed: bool) -> None:
    def go_when_it_waits(job: Job, folder: Path) -> None:
        if killed:
            os.kill(wait_for_spares(job, 1)[0], signal.SIGKILL)
        spares.append(wait_for_spares(job, 1 + killed)[-1])
        (folder / "go").touch()

    spares: list[int] = []
    words = [*late, "--hold-at", 5, *faults("1:8:forward")]
    job, _ = runs.run(2, *words, options=["--spares", "1", *PATIENT], meanwhile=go_when_it_waits)
    check_in_place(job, [1])
    assert job.processes()[1][1] == spares[0]


# --- programs ---


@drill
def test_a_model_goes_on_in_place(tmp_path: Path) -> None:
    def run(name: str, *args: object) -> Job:
        folder = tmp_path / name
        env = {"MINDX_ARENA_DIR": str(tmp_path)}
        script, words = "train_model.py", (folder / "ckpt", "--epochs", 2, "--save-steps", 4, *args)
        options = ["--recover", "in-place"]
        with start_agent(script, *words, ranks=2, options=options, env=env, run_dir=folder / "run") as job:
            return job.expect(0)

    plain, killed = run("plain"), run("killed", "--kill-at", 5)
    assert killed.matches(r"^KILL 1 5")
    check_in_place(killed, [1])
    assert killed.hashes() == plain.hashes() and not killed.matches("the guard does not keep it")
    assert {m[0] for m in killed.matches(r"EVAL 2 .*")} == {m[0] for m in plain.matches(r"EVAL 2 .*")}
    # Rank 1 died in a callback that rank 0 had ended: what its own callbacks count there is one step short, and told.
    assert {m[0] for m in plain.matches(r"STEPS .*")} == {"STEPS 0 18", "STEPS 1 18"}
    assert {m[0] for m in killed.matches(r"STEPS .*")} == {"STEPS 0 18", "STEPS 1 17"}
    assert killed.matches("cut off on rank 1 and not on the others")


@drill
def test_what_the_function_and_an_evaluation_did_to_a_survivor_is_taken_back(runs: Runs) -> None:
    """Hooks and wrapped functions would be there twice, and DDP would leave out a broadcast of the new process."""
    job, _ = runs.run(2, "--evaluate", "ddp", "--inside", "hooks", *faults("1:12:eval", "0:20:forward"))
    check_in_place(job, [1, 0])


ORDERS = ("1:5:forward", "0:8:mid", "1:11:backward")
INSIDE = ("1:5:forward", "0:8:inside", "1:11:inside")
"""In front of the wait for a collective that runs already."""


@drill
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("form", "orders"),
    [
        ("suppresses_a_failed_wait", INSIDE),
        ("suppresses_a_failed_functional_collective", INSIDE),
        ("asks_whether_collectives_are_over", INSIDE),
        ("closes_a_named_generator_with_a_collective", ORDERS),
        ("catches_what_backward_raises", ORDERS),
        ("tries_again", ORDERS),
        ("catches_everything_in_a_step", ORDERS),
        ("catches_everything_around_the_loop", ORDERS),
        ("translates_errors", ORDERS),
        ("ends_each_step_with_a_collective", ORDERS),
    ],
)
def test_whatever_a_program_does_with_errors_it_goes_on_in_place(
    runs: Runs, form: str, orders: Sequence[str], ranks: int
) -> None:
    job, _ = runs.run(ranks, "--form", form, "--size", 48 * ranks, *faults(*orders))
    check_in_place(job, victims(orders))


@drill
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_that_are_averaged_by_hand_in_no_sync(runs: Runs, ranks: int) -> None:
    """Each rank has batch norm statistics of its own. The first death restarts the job, which lays out the buckets."""
    words = ["--form", "averages_by_hand_and_suppresses", "--size", str(48 * ranks)]
    orders = (*INSIDE, "0:14:backward")
    job = runs.start(runs.new_folder(), ranks, [*words, *faults(*orders)])
    assert len(job.matches("^FAULT ")) == len(orders), job.report()
    assert job.hashes() == runs.undisturbed(ranks, words)[0], job.report()
    assert len(job.matches(IN_PLACE)) == len(orders) - 1, job.report()
    assert job.matches("not laid out its buckets") and not job.matches("as in local SGD"), job.report()


FOURS = ("1:6:forward", "0:10:backward", "1:14:mid", "0:20:update")
THREES = ("1:5:forward", "0:7:backward", "1:10:start", "0:15:update")
"""One in each window: the ranks meet at its end only."""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=drill)])
@pytest.mark.parametrize(
    ("more", "orders"),
    [
        (("--accumulate", 4, "--amp", "--clip"), FOURS),
        pytest.param(("--accumulate", 3, "--clip"), THREES, marks=drill),
    ],
)
def test_in_a_window_of_accumulation_with_clipping(
    runs: Runs, ranks: int, more: Sequence[object], orders: Sequence[str]
) -> None:
    """All ranks go back to the window's beginning, also from the parts of it in which they do not meet."""
    job, _ = runs.run(ranks, "--size", 48 * ranks, *more, *faults(*orders))
    check_in_place(job, victims(orders))


# --- what is told ---


@drill
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--inside", "count", *faults("1:8:forward")), r'count" \(.*the ranks that live on and the new one differ'),
        (("--form", "keeps_tensors_outside", *faults("1:5:forward")), r'the length of "HISTORY" .*the new one differ'),
    ],
)
def test_what_survivors_and_the_new_process_do_not_have_alike_is_named(
    runs: Runs, args: Sequence[str], words: str
) -> None:
    """The training may depend on it: a restart would start it over on all ranks."""
    job = runs.start(runs.new_folder(), 2, args)
    assert job.matches("^FAULT 1 ") and job.matches(words), job.report()
    check_in_place(job, [1])


@drill
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--setup", "gather", *faults("1:6:start")), "all_gather"),
        (("--with-guard", *faults("1:6:start")), "not inside of guard.run"),
        (faults("1:1:forward"), "which is too early"),
        *(
            (("--compile", what, *faults("1:5:forward", "0:9:mid")), "only a restart compiles it the same again")
            for what in ("model", "ddp", "loss", "step")
        ),
    ],
)
def test_a_program_that_cannot_be_joined_is_restarted_and_told_why(
    runs: Runs, args: Sequence[str], reason: str
) -> None:
    job, _ = runs.run(2, *args)
    check_restarted(job, reason, list(args).count("--fault"))


@drill
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--shard", "fsdp"), "different parts of the state"),
        (("--shard", "zero"), "different parts of the state"),
        (("--compress",), "communication hook"),
    ],
)
def test_a_job_that_cannot_go_on_in_place_says_so_at_its_start_and_is_restarted(
    runs: Runs, more: Sequence[object], words: str
) -> None:
    job, _ = runs.run(2, *more, *faults("1:6:mid"), options=(*PATIENT, "--snapshot-every", "1"))
    assert job.matches(f"--recover in-place: .*{words}.* the whole job is restarted"), job.report()
    assert job.matches(RESTART) and not job.matches(IN_PLACE), job.report()
    assert set(job.resumed()) == {"None", "5"}, job.report()


@drill
def test_without_room_for_the_donors_state_the_job_is_restarted(runs: Runs, tmp_path: Path) -> None:
    """Shared memory has room for the small state of each rank, and not for the weights."""
    with small_disk(tmp_path / "shm", "2M"):
        env: Any = {"MINDX_ARENA_DIR": str(tmp_path / "shm")}
        job, folder = runs.run(2, "--megabytes", 4, *faults("1:6:forward"), env=env)
    check_restarted(job, "does not fit into shared memory")
    assert events(folder / "run", "rejoin")[0]["outcome"] == "restart"
