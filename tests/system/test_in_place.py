"""Recoveries in place: whatever dies, wherever, the survivors keep their processes, and the end is bit for bit that of
the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from mindx_elastic.rejoin.record import STAGES
from tests.harness import JOBS, Job, events, free_port, job_status, start_agent

pytestmark = pytest.mark.slow
drill = pytest.mark.drill

JOB = "in_place.py"
IN_PLACE = r"recovery \d+ in place: ranks? ([\d, ]+) replaced, all ranks train on from step (\d+)"
WHY = r"no recovery in place: (.*)"
PATIENT = ("--rejoin-timeout", "120")
PLAIN = {"--fault": 1, "--catch": 1, "--resources": 0, "--hold-at": 1}
"""Options that do not change what is trained, and how many words follow."""


class Runs:
    """Disturbed runs, each beside the undisturbed one of the same training, which runs once."""

    def __init__(self, folder: Path, job: str = JOB) -> None:
        self._folder, self._count, self._job = folder, 0, job
        self._known: dict[tuple[object, ...], tuple[dict[int, str], dict[str, list[int]]]] = {}

    def run(
        self,
        ranks: int,
        *args: object,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        meanwhile: Callable[[Job], None] = lambda job: None,
        code: int = 0,
    ) -> tuple[Job, Path]:
        """Run it, and insist on the same end as without faults: weights, optimizer, random numbers, samples."""
        words = [str(each) for each in args]
        expected = self.undisturbed(ranks, words)
        folder = self.new_folder()
        job = self.start(folder, ranks, words, options, env or {}, meanwhile, code)
        wanted = sum(word == "--fault" for word in words)
        assert len(job.matches(r"^FAULT ")) == wanted, job.report()
        if code == 0:
            assert (job.hashes(), _seen(job)) == expected, job.report()
            assert not job.matches("not bit for bit"), job.report()
        return job, folder

    def new_folder(self) -> Path:
        self._count += 1
        return self._folder / f"run{self._count}"

    def undisturbed(self, ranks: int, words: Sequence[str]) -> tuple[dict[int, str], dict[str, list[int]]]:
        """Hashes and samples of the same training without faults."""
        plain = _without_faults(words)
        key = (ranks, *plain)
        if key not in self._known:
            job = self.start(self._folder / f"plain{len(self._known)}", ranks, plain)
            self._known[key] = job.hashes(), _seen(job)
        return self._known[key]

    def start(
        self,
        folder: Path,
        ranks: int,
        args: Sequence[str],
        options: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        meanwhile: Callable[[Job], None] = lambda job: None,
        code: int | None = 0,
    ) -> Job:
        """`code`: None: the agent is killed."""
        (folder / "shm").mkdir(parents=True, exist_ok=True)
        env = {"MINDX_ARENA_DIR": str(folder / "shm"), **env}
        options = ["--recover", "in-place", *options]
        with start_agent(
            self._job, folder, *args, ranks=ranks, options=options, env=env, run_dir=folder / "run"
        ) as job:
            meanwhile(job)
            if code is None:
                return job
            job.expect(code)
            assert not list((folder / "shm").glob("*/agent-*")), job.report()
        return job


def job_folder(job: Job) -> Path:
    """The folder that a job was given."""
    return Path(job.command[job.command.index(str(JOBS / JOB)) + 1])


def _without_faults(words: Sequence[str]) -> list[str]:
    found, rest = [], iter(words)
    for word in rest:
        if word in PLAIN:
            for _ in range(PLAIN[word]):
                next(rest)
        else:
            found.append(word)
    return found


def _seen(job: Job) -> dict[str, list[int]]:
    """The samples of each epoch. A step that is done again has the same ones."""
    steps: dict[tuple[str, str], tuple[str, str]] = {}
    for match in job.matches(r"SEEN (\d+) ([\d,]+) (\d+) (\d+)"):
        what = match[1], match[2]
        assert steps.setdefault((match[3], match[4]), what) == what, job.report()
    found: dict[str, list[int]] = {}
    for epoch, samples in steps.values():
        found.setdefault(epoch, []).extend(map(int, samples.split(",")))
    return {epoch: sorted(samples) for epoch, samples in found.items()}


def processes(job: Job) -> dict[int, list[int]]:
    """The processes of each rank, in the order in which they came."""
    found: dict[int, list[int]] = {}
    for match in job.matches(r"READY (\d+) (\d+)"):
        pids = found.setdefault(int(match[1]), [])
        if int(match[2]) not in pids:
            pids.append(int(match[2]))
    return found


def check_in_place(job: Job, deaths: Sequence[int]) -> None:
    """Each death cost its own rank a process, and no other rank."""
    replaced = [int(rank) for match in job.matches(IN_PLACE) for rank in match[1].split(",")]
    assert sorted(replaced) == sorted(deaths), job.report()
    for rank, pids in processes(job).items():
        assert len(pids) == 1 + deaths.count(rank), job.report()
    assert not job.matches(WHY), job.report()
    assert not job.matches(r"restart \d+ of"), job.report()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("in_place"))


def faults(*orders: str) -> list[str]:
    return [word for order in orders for word in ("--fault", order)]


def victims(orders: Sequence[str]) -> list[int]:
    return [int(order.partition(":")[0]) for order in orders]


TWO = ("1:3:start", "0:4:forward", "1:6:mid", "0:8:backward", "1:10:update", "0:12:eval", "1:13:after", "0:15:save")
THREE = ("2:3:start", "0:4:forward", "1:6:mid", "2:8:eval", "0:9:backward", "1:11:update", "2:13:after", "0:15:save")


def test_two_ranks_killed_in_turn_at_every_place_of_a_step(runs: Runs) -> None:
    orders = faults(*TWO)
    job, folder = runs.run(2, "--epochs", 2, "--evaluate", "no_grad", "--save-every", 5, *orders)
    check_in_place(job, victims(TWO))
    told = [event for event in events(folder / "run", "rejoin") if event["outcome"] == "in place"]
    assert len(told) == len(TWO)
    assert set(STAGES) - {"first_step"} <= set(told[0]["stages"]) <= set(STAGES)
    assert sum("first_step" in each["stages"] for each in told) > len(TWO) // 2
    check_status(folder / "run", job, TWO)
    assert not any((folder / "shm").rglob("*.safetensors")), "shared memory is given back"


def check_status(run_dir: Path, job: Job, orders: Sequence[str]) -> None:
    """`mindx-elastic status` says what has happened."""
    document = job_status(run_dir)
    found, pids = document["recoveries"], processes(job)
    assert [(each["outcome"], each["ranks"]) for each in found] == [("in place", [rank]) for rank in victims(orders)]
    assert [each["generation"] for each in found] == list(range(1, len(orders) + 1))
    for rank, of_rank in pids.items():
        assert [each["pid"] for one in found for each in one["stood_in"] if each["rank"] == rank] == of_rank[1:]
    for each in found:
        (stand_in,) = each["stood_in"]
        assert stand_in["by"] in ("zygote", "fresh")
        assert (each["cause"], each["reason"], each["steps_lost"]) == ("killed by SIGKILL", "", 0)
        assert each["donor"] not in each["ranks"]
        assert 0 <= each["stages"]["detect"] < 5
    totals = document["totals"]
    assert (totals["failures"], totals["in_place"], totals["steps_lost"]) == (len(orders), len(orders), 0)
    assert totals["not_training_s"] == pytest.approx(sum(each["duration_s"] for each in found), abs=0.01)
    assert job.matches(rf"^{len(orders)} failures \(recovered in place\), 0 steps lost, ")


@drill
@pytest.mark.parametrize(
    "more",
    [
        ("--evaluate", "inference", "--save-every", 5, "--num-workers", 2),
        ("--evaluate", "no_grad", "--save-every", 5, "--setup", "group"),
        ("--evaluate", "no_grad", "--save-every", 5, "--setup", "barrier"),
    ],
    ids=["workers", "group", "barrier"],
)
def test_three_ranks_killed_in_turn_at_every_place_of_a_step(runs: Runs, more: Sequence[object]) -> None:
    job, _ = runs.run(3, "--epochs", 3, *more, *faults(*THREE))
    check_in_place(job, victims(THREE))


@pytest.mark.parametrize(
    "late", [["--late-rank"], pytest.param([], marks=drill)], ids=["model built", "rank asked for at once"]
)
def test_a_warm_spare_takes_a_dead_ranks_place(runs: Runs, late: Sequence[str]) -> None:
    def go_when_it_waits(job: Job) -> None:
        (spare,) = job.wait_for(r"a spare \(pid (\d+)\) waits")
        spares.append(int(spare[1]))
        (job_folder(job) / "go").touch()

    spares: list[int] = []
    words = ["--epochs", 2, *late, "--hold-at", 5, *faults("1:8:forward")]
    job, _ = runs.run(2, *words, options=["--spares", "1"], meanwhile=go_when_it_waits)
    check_in_place(job, [1])
    assert processes(job)[1][1] == spares[0]


@drill
def test_a_model_goes_on_in_place(tmp_path: Path) -> None:
    def run(name: str, *args: object) -> Job:
        folder = tmp_path / name
        env = {"MINDX_ARENA_DIR": str(tmp_path)}
        options = ["--recover", "in-place"]
        words = [folder / "ckpt", "--epochs", 2, "--save-steps", 4, *args]
        with start_agent("train_model.py", *words, ranks=2, options=options, env=env, run_dir=folder / "run") as job:
            return job.expect(0)

    plain, killed = run("plain"), run("killed", "--kill-at", 5)
    assert killed.matches(r"^KILL 1 5")
    check_in_place(killed, [1])
    assert killed.hashes() == plain.hashes()
    for pattern in (r"EVAL 2 .*", r"STEPS .*"):  # callbacks have counted each step once
        assert {m[0] for m in killed.matches(pattern)} == {m[0] for m in plain.matches(pattern)}


@drill
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_rank_and_one_that_spins_are_replaced(runs: Runs, ranks: int) -> None:
    orders = (f"{ranks - 1}:4:mid:stop", "0:7:backward:spin")
    job, folder = runs.run(ranks, "--epochs", 2, *faults(*orders), options=["--hang-timeout", "3"])
    check_in_place(job, victims(orders))
    document = job_status(folder / "run")
    for each in document["recoveries"]:
        assert each["cause"].startswith("hang: no step for ") and each["stages"]["detect"] >= 3.0
    assert document["totals"]["not_training_s"] >= 6.0, "the time in which they were stuck counts"


@drill
@pytest.mark.parametrize(("ranks", "dead"), [(3, (0, 1)), (4, (0, 2)), (4, (1, 2, 3)), (5, (3,)), (5, (0, 2, 4))])
def test_several_ranks_killed_at_once(runs: Runs, ranks: int, dead: Sequence[int]) -> None:
    orders = [f"{rank}:6:start" for rank in dead]
    job, _ = runs.run(ranks, "--epochs", 2, *faults(*orders))
    assert job.matches(IN_PLACE) or job.matches(WHY), job.report()


@drill
def test_what_the_function_and_an_evaluation_did_to_a_survivor_is_taken_back(runs: Runs) -> None:
    """Hooks and wrapped functions would be there twice, and DDP would leave out a broadcast of the new process."""
    job, _ = runs.run(
        2,
        "--epochs",
        2,
        "--evaluate",
        "ddp",
        "--inside",
        "hooks",
        *faults("1:12:eval", "0:20:forward"),
        options=("--rejoin-timeout", "120"),
    )
    check_in_place(job, [1, 0])


@drill
def test_a_counter_that_no_guard_keeps_is_named(runs: Runs) -> None:
    patient = ("--rejoin-timeout", "120")
    job, _ = runs.run(2, "--epochs", 1, "--inside", "count", *faults("1:8:forward"), options=patient)
    check_in_place(job, [1])
    assert job.matches(r'count" \(.*the ranks that live on and the new one differ in this'), job.report()


@drill
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--setup", "gather"), "all_gather"),
        (("--with-guard",), "not inside of guard.run"),
    ],
)
def test_a_program_that_cannot_be_joined_is_restarted_and_told_why(
    runs: Runs, args: Sequence[object], reason: str
) -> None:
    job, _ = runs.run(2, "--epochs", 2, *args, *faults("1:6:start"))
    assert job.matches(r"restart 1 of"), job.report()
    assert any(reason in match[1] for match in job.matches(WHY)), job.report()


@drill
@pytest.mark.parametrize(
    ("script", "more", "words"),
    [
        ("sharded.py", (), "different parts of the state"),
        ("sharded.py", ("--zero",), "different parts of the state"),
        (JOB, ("--epochs", 1, "--compress"), "communication hook"),
    ],
)
def test_a_job_that_cannot_go_on_in_place_says_so_at_its_start_and_is_restarted(
    tmp_path: Path, script: str, more: Sequence[object], words: str
) -> None:
    options = (*PATIENT, "--snapshot-every", "1")
    job, _ = Runs(tmp_path, script).run(2, *more, *faults("1:6:mid"), options=options)
    assert job.matches(f"--recover in-place: .*{words}.* the whole job is restarted"), job.report()
    assert job.matches(r"restart 1 of") and not job.matches(IN_PLACE), job.report()
    assert {match[1] for match in job.matches(r"READY \d \d+ (\w+)$")} == {"None", "5"}, job.report()


@drill
def test_an_error_of_the_program_restarts_the_job(runs: Runs) -> None:
    job, _ = runs.run(2, "--epochs", 2, *faults("1:6:start:raise"))
    assert job.matches(r"ValueError: injected"), job.report()


@drill
@pytest.mark.parametrize("where", ["forward", "update"])
def test_a_death_in_the_first_step_after_a_start_from_files(runs: Runs, where: str) -> None:
    """The boundary that the survivors go on from is that of the files, and the dead rank had passed none of its own."""
    words = ["--epochs", "2"]
    job, folder = runs.run(2, *words, *faults("0:4:after:term"), code=143)
    (saved,) = {int(match[1]) for match in job.matches(r"step (\d+) saved in ")}
    job = runs.start(folder, 2, [*words, *faults(f"1:{saved + 1}:{where}")])
    assert job.matches(f"FAULT 1 {saved + 1} {where}") and job.matches(IN_PLACE), job.report()
    assert job.hashes() == runs.undisturbed(2, words)[0], job.report()
    assert not job.matches("not bit for bit"), job.report()


@drill
def test_a_job_of_one_node_needs_no_endpoint_and_may_have_one(runs: Runs) -> None:
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    job, _ = runs.run(2, "--epochs", 1, *faults("1:6:mid"), options=options)
    check_in_place(job, [1])


@drill
def test_fifty_recoveries_in_one_job_and_what_they_leave_behind(runs: Runs) -> None:
    """As docs/agent.md says: 3 threads and about 5 descriptors each, in the survivor. Then the cap is reached."""
    orders = [f"1:{step}:{('start', 'forward', 'mid', 'backward', 'update')[step % 5]}" for step in range(3, 54)]
    words = ["--epochs", 5, "--resources", *faults(*orders)]
    job, folder = runs.run(2, *words, env={"MINDX_REJOIN_MOST": "50"}, options=("--rejoin-timeout", "100"))
    assert len(job.matches(IN_PLACE)) == 50, job.report()
    whys = {match[1].partition(";")[0] for match in job.matches(WHY)}
    assert whys == {"there were 50 in this attempt, and each leaves threads and descriptors behind"}, job.report()
    assert len(job.matches(r"restart \d+ of")) == 1, job.report()
    pids = processes(job)
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
