"""What a program has asked for, and where."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch.distributed as dist

from mindx_elastic.rejoin.asked import RANK, SIZE, Asked

OUTSIDE = "the program has asked for the number of ranks outside of the function of guard.run"
ONCE = "the program has asked for the number of ranks in one step only, and may keep the answer"
KEPT = "the program has not asked again for the number of ranks, and may keep the last answer"


class Program:
    """Asks as a program does: from its own lines."""

    def __init__(self) -> None:
        self.asked = Asked()

    def ask(self, what: str = SIZE) -> None:
        self.asked.note(what, sys._getframe(1))

    def one(self) -> None:
        self.ask()

    def other(self) -> None:
        self.ask()

    def rank(self) -> None:
        self.ask(RANK)

    def helper(self) -> None:
        """One line that many call, as `utils.get_world_size()`."""
        self.ask()

    def call(self, opening: Callable[[], object], *steps: Callable[[], object]) -> str:
        """A call of the function; what it says before its first update."""
        self.asked.enter()
        said = ""
        opening()
        for step in steps or [nothing]:
            step()
            if self.asked.is_opening:
                said = self.asked.end_opening()
            self.asked.pass_boundary()
        return said


def nothing() -> None:
    pass


@pytest.fixture
def program() -> Program:
    return Program()


def test_outside_of_the_function(program: Program) -> None:
    program.one()
    program.call(nothing)
    found = program.asked.problem(rank_changes=False)
    assert found.startswith(f"{OUTSIDE} ({Path(__file__).name}:"), found


def test_a_rank_that_stays_is_no_matter(program: Program) -> None:
    program.rank()
    assert program.call(program.rank, program.rank) == ""
    assert program.asked.problem(rank_changes=False) == ""
    assert "asked for the rank outside" in program.asked.problem(rank_changes=True)


def test_asked_again_in_each_call(program: Program) -> None:
    for _ in range(3):
        assert program.call(program.one, nothing) == ""
        assert program.asked.problem(rank_changes=False) == ""
        program.asked.begin_anew(rank_changes=False)


def test_kept_from_one_call_to_the_next(program: Program) -> None:
    program.call(program.one, nothing)
    program.asked.begin_anew(rank_changes=False)
    assert program.call(program.other, nothing).startswith(KEPT)
    assert program.call(program.other, nothing) == "", "it is said once"


def test_kept_before_a_recovery_with_as_many_ranks(program: Program) -> None:
    """The second call has not asked, because it has what the first one was told."""
    program.call(program.one, nothing)
    program.call(nothing, nothing)
    program.asked.begin_anew(rank_changes=False)
    assert program.call(nothing).startswith(KEPT)


def test_a_rank_that_is_kept_and_changes_only_later(program: Program) -> None:
    """The last place is lost, then the first one."""
    program.call(program.rank, nothing)
    program.asked.begin_anew(rank_changes=False)
    assert program.call(nothing, nothing) == ""
    assert program.asked.problem(rank_changes=True) == ""
    program.asked.begin_anew(rank_changes=True)
    assert "asked again for the rank" in program.call(nothing)


def test_one_of_two_that_ask_at_the_same_line_keeps_its_answer(program: Program) -> None:
    def both() -> None:
        program.helper()
        program.helper()

    program.call(both, nothing)
    program.asked.begin_anew(rank_changes=False)
    assert program.call(program.helper, nothing).startswith(KEPT)


def test_in_a_loop_at_the_same_line(program: Program) -> None:
    def ask(times: int) -> None:
        for _ in range(times):
            program.helper()

    def begin(times: int) -> Callable[[], None]:
        return lambda: ask(times)

    def call(times: int) -> str:
        return program.call(begin(times), nothing)

    call(2)
    program.asked.begin_anew(rank_changes=False)
    assert call(1).startswith(KEPT)


def test_in_a_forked_process(program: Program) -> None:
    """As a worker of a DataLoader, which may go on with the answer when the function is called again."""

    def fork() -> None:
        child = os.fork()
        if not child:
            program.rank()
            program.one()
            os._exit(0)
        os.waitpid(child, 0)

    assert program.call(fork, nothing) == ""
    found = program.asked.problem(rank_changes=False)
    assert "forked" in found and "asked for the number of ranks" in found, found


def test_in_a_thread(program: Program) -> None:
    """As one that feeds batches: it asks at the begin of each pass over its data, and has the answer until the next."""

    def ask() -> None:
        thread = threading.Thread(target=program.one)
        thread.start()
        thread.join()

    assert program.call(nothing, *[ask] * 3) == ""
    assert program.asked.problem(rank_changes=False).startswith(OUTSIDE)


def test_in_one_step_only(program: Program) -> None:
    program.call(nothing, nothing, program.one, nothing)
    assert program.asked.problem(rank_changes=False).startswith(ONCE)


def test_twice_in_one_step(program: Program) -> None:
    """Two loaders of an evaluation, made when it runs for the first time."""

    def evaluate() -> None:
        for _ in range(2):
            program.helper()

    program.call(nothing, nothing, evaluate)
    assert program.asked.problem(rank_changes=False).startswith(ONCE)


def test_again_and_again(program: Program) -> None:
    """In each step, in the first one before its update: nobody keeps that."""
    for _ in range(3):
        assert program.call(nothing, *[program.one] * 3) == ""
        assert program.asked.problem(rank_changes=False) == ""
        program.asked.begin_anew(rank_changes=False)


def test_what_libraries_ask_for_is_theirs() -> None:
    program, space = Program(), dict[str, Any](__name__="torch.nn.parallel.distributed")
    exec("def wrap(ask): ask()", space)  # noqa: S102
    space["wrap"](program.ask)
    assert program.asked.problem(rank_changes=True) == ""


def test_a_sampler_asks_for_who_makes_it() -> None:
    program, space = Program(), dict[str, Any](__name__="torch.utils.data.distributed")
    exec("def make(ask): ask()", space)  # noqa: S102
    space["make"](program.ask)
    assert program.asked.problem(rank_changes=False).startswith(OUTSIDE)


QUESTIONS = {
    "get_rank": "dist.get_rank()",
    "group rank": "dist.group.WORLD.rank()",
    "local rank": "dist.get_node_local_rank(0)",
    "variable": "os.environ.get('LOCAL_RANK')",
    "bytes": "os.environb[b'RANK']",
    "get_world_size": "dist.get_world_size()",
    "imported before": "size_of()",
    "group size": "dist.group.WORLD.size()",
    "ranks": "dist.get_process_group_ranks(dist.group.WORLD)",
    "all variables": "dict(os.environ)",
    "in": "'WORLD_SIZE' in os.environ",
    "getenv": "os.getenv('WORLD_SIZE')",
    "all_reduce": "dist.all_reduce(torch.ones(1))",
    "all_gather_object": "dist.all_gather_object([None], 1)",
    "functional": "functional.all_reduce(torch.ones(1), 'sum', dist.group.WORLD)",
    "sampler": "DistributedSampler(TensorDataset(torch.zeros(4)))",
    "length": "len(mx.data.ResumableLoader(range(8), 2))",
    **(
        {"all_gather_single": "dist.all_gather_single(torch.zeros(1), torch.ones(1))"}
        if hasattr(dist, "all_gather_single")  # from torch 2.13 on
        else {}
    ),
    "with gradients": "dist_nn.all_gather(torch.ones(1))",
    "mesh": "init_device_mesh('cpu', (1,))",
    "mesh of a group": "DeviceMesh.from_group(dist.group.WORLD, 'cpu')",
    "elastic sampler": "ElasticDistributedSampler(TensorDataset(torch.zeros(4)))",
    "rendezvous": "next(dist.rendezvous('env://'))",
    "cluster": "mx.cluster.get_group_size()",
    "places": "os.environ.get('MINDX_PLACES')",
    "restarts": "os.environ.get('TORCHELASTIC_RESTART_COUNT')",
}
LEFT_ALONE = {
    "DDP": "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()",
    "barrier": "dist.barrier()",
    "broadcast": "dist.broadcast_object_list([1])",
    "loader": "mx.data.ResumableLoader(range(8), 2, shuffle=True)",
    "guard": "mx.Guard(model=torch.nn.Linear(2, 2), directory='ckpt')",
    "another variable": "os.environ.get('HOME')",
    "new group": "dist.new_group([0])",
}


def run_alone(program: Path) -> subprocess.CompletedProcess[str]:
    """As the only rank of a job that is watched."""
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "MINDX_PLACES": "0",
        "MINDX_FULL_WORLD_SIZE": "3",
        "MINDX_RECOVER": "in-place",
        "OMP_NUM_THREADS": "1",
        "HOME": str(program.parent),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    command = [sys.executable, str(program)]
    return subprocess.run(
        command, check=False, env=env, capture_output=True, text=True, timeout=300, cwd=program.parent
    )


def test_every_question_is_heard(tmp_path: Path) -> None:
    """In a process of its own: the functions of torch listen from then on."""
    program = tmp_path / "train.py"
    program.write_text(
        dedent(
            f"""
            import os, sys
            import torch
            import torch.distributed as dist
            import torch.distributed._functional_collectives as functional
            from torch.distributed import get_world_size as size_of
            import torch.distributed.nn as dist_nn
            from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
            from torch.distributed.elastic.utils.data import ElasticDistributedSampler
            from torch.utils.data import DistributedSampler, TensorDataset
            import mindx_elastic as mx
            from mindx_elastic.rejoin import asked

            dist.init_process_group("gloo")
            asked.prepare()
            log = asked.current()
            assert log.problem(rank_changes=True) == "", log.problem(rank_changes=True)
            for name, line in {QUESTIONS | LEFT_ALONE!r}.items():
                log._outside.clear()
                exec(compile(line, "train.py", "exec"))
                found = log.problem(rank_changes=False) or log.problem(rank_changes=True)
                print(name, "|", found)
            """
        )
    )
    done = run_alone(program)
    said = dict(line.split(" | ") for line in done.stdout.splitlines() if " | " in line)
    assert said.keys() == (QUESTIONS | LEFT_ALONE).keys(), done.stdout + done.stderr
    ranks = {"get_rank", "group rank", "local rank", "variable", "bytes"}
    for name in QUESTIONS:
        what = "the rank" if name in ranks else "the number of re" if name == "restarts" else "the number of ranks"
        assert said[name].startswith(f"the program has asked for {what}"), (name, said[name], done.stderr)
        assert said[name].endswith("(train.py:1)"), (name, said[name])
    assert {name: said[name].strip() for name in LEFT_ALONE} == dict.fromkeys(LEFT_ALONE, ""), done.stderr


@pytest.mark.drill
def test_a_program_that_is_watched_compiles_as_one_that_is_not(tmp_path: Path) -> None:
    """In one piece: torch.compile knows these functions, and does not stumble over what listens to them."""
    program = tmp_path / "train.py"
    program.write_text(
        dedent(
            """
            import os
            import torch
            import torch.distributed as dist
            import torch.distributed._functional_collectives as functional
            from mindx_elastic.rejoin import asked

            asked.prepare()
            assert asked.current() is not None
            dist.init_process_group("gloo")

            @torch.compile(backend="eager", fullgraph=True)
            def step(x):
                dist.all_reduce(x)
                x = functional.all_reduce(x, "sum", dist.group.WORLD) * dist.get_world_size() + dist.get_rank()
                return x * int(os.environ["WORLD_SIZE"])

            print("GIVES", step(torch.ones(1)).item())
            """
        )
    )
    done = run_alone(program)
    assert "GIVES 1.0" in done.stdout, done.stdout + done.stderr


def test_torch_is_imported_by_the_program(tmp_path: Path) -> None:
    """What it sets before counts, and its questions are heard nevertheless."""
    program = tmp_path / "train.py"
    program.write_text(
        dedent(
            """
            import os, sys
            from mindx_elastic.rejoin import asked

            asked.prepare()
            assert "torch" not in sys.modules
            os.environ["OMP_NUM_THREADS"] = "2"
            import inspect
            import torch
            import torch.distributed as dist
            import torch.distributed._functional_collectives as functional

            dist.init_process_group("gloo")
            for ask in (dist.get_world_size, dist.group.WORLD.size, lambda: functional.all_reduce(
                torch.ones(1), "sum", dist.group.WORLD)):
                assert asked.current().problem(rank_changes=False) == ""
                ask()
                print("HEARD", asked.current().problem(rank_changes=False))
                asked.current()._outside.clear()
            print("THREADS", torch.get_num_threads(), inspect.getsource(dist.get_world_size).splitlines()[0])
            """
        )
    )
    done = run_alone(program)
    assert done.stdout.count(f"HEARD {OUTSIDE}") == 3, done.stdout + done.stderr
    assert "THREADS 2 def get_world_size(" in done.stdout, done.stdout + done.stderr
