"""Launchers whose variables are not read: what is refused, and what must not be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.agent.options import check_options
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.launchers import at_a_stop, current_ranks, refusal

# As Slurm 22.05 sets them.
SLURM_ALLOCATION = {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_TASKS_PER_NODE": "2"}
SLURM_BATCH = {**SLURM_ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SLURM_STEP = {**SLURM_BATCH, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}

SEVERAL = [
    ({"RANK_ID": "0", "RANK_SIZE": "8"}, "RANK_ID=0, RANK_SIZE=8,"),
    ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "h"}, "MS_ROLE=MS_WORKER, MS_WORKER_NUM=2,"),
    ({"MS_WORKER_NUM": "4"}, "MS_WORKER_NUM=4,"),
    (SLURM_STEP, "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2,"),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4,"),
    ({**SLURM_STEP, "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4,"),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_RANK=0, PMI_SIZE=2,"),
    ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE=2,"),
    ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, "HOROVOD_RANK=1, HOROVOD_SIZE=2,"),
    ({"RANK_ID": "1", "WORLD_SIZE": " "}, "RANK_ID=1,"),
]
SINGLE: list[dict[str, str]] = [
    SLURM_ALLOCATION,
    SLURM_BATCH,
    {**SLURM_BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
    {"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "0"},
    {"MS_WORKER_NUM": "1"},
    {"RANK_ID": "", "MS_ROLE": " "},
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    {**SLURM_STEP, "OMPI_COMM_WORLD_SIZE": "1"},
    {**SLURM_STEP, "WORLD_SIZE": "1"},
    {"RANK_ID": "1", "WORLD_SIZE": "2", "RANK": "1"},
    {"PMI_SIZE": "many"},
]
NAMES = {name for variables in (*(each[0] for each in SEVERAL), *SINGLE) for name in variables}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may run in a Slurm step."""
    for name in {*NAMES, "WORLD_SIZE", "RANK"}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("variables", "named"), SEVERAL, ids=lambda value: value if isinstance(value, str) else "")
def test_one_of_several_is_refused_with_the_way_out(variables: dict[str, str], named: str) -> None:
    said = refusal(variables)
    assert said.startswith(named)
    assert "mindx-elastic " in said and "WORLD_SIZE=1" in said and "docs/platforms.md" in said
    assert said.count("\n") == 1 and len(said) <= 320


def test_the_way_out_of_srun_is_a_command() -> None:
    command = refusal(SLURM_STEP).partition("Start the job with ")[2].partition(" in a ")[0]
    *words, script = ["4" if word == "N" else word for word in command.split()]
    assert words[:2] == ["mindx-elastic", "run"] and script == "SCRIPT"
    check_options(words[2:])


@pytest.mark.parametrize("variables", SINGLE, ids=lambda value: " ".join(value) or "nothing")
def test_a_job_of_one_process_is_left_alone(variables: dict[str, str]) -> None:
    assert refusal(variables) == ""


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("variables", [SLURM_STEP, {"RANK_ID": "0"}, {"OMPI_COMM_WORLD_SIZE": "2"}])
def test_an_initialised_torch_distributed_settles_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, or through mpi4py: whoever did it has read the variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert current_ranks(RankInfo.from_env()).world_size == 1


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize(
    ("variables", "local"),
    [
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "3"}, 3),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "2"}, 2),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "2", "LOCAL_RANK": "1"}, 1),
        ({"PMI_RANK": "4", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2"}, 0),  # another group than the launcher's
    ],
)
def test_the_local_rank_is_the_launcher_s_where_the_group_agrees(
    variables: dict[str, str], local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert current_ranks(RankInfo.from_env()).local_rank == local


@pytest.mark.parametrize(
    ("variables", "parent", "said"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun -np 2", "1 s after its SIGTERM"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_odls_base_sigkill_timeout": "20"}, "", "20 s after its SIGTERM"),
        ({"SLURM_STEP_ID": "0"}, "slurmstepd: [4.0]", "srun client kills this process"),
        ({}, "python -m deepspeed.launcher.launch --world_info=e", "deepspeed dies of a SIGTERM"),
        ({"SUPERVISOR_ENABLED": "1"}, "supervisord", "kills it 10 s later"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "MINDX_GRACE_S": "20"}, "", ""),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PRTE_LAUNCHED": "1", "MINDX_GRACE_S": "20"}, "", "kills this process unheard"),
        ({"SLURM_STEP_ID": "0"}, "python mindx-elastic run", ""),
        ({}, "bash", ""),
    ],
)
def test_what_a_launcher_does_at_a_stop_is_told(variables: dict[str, str], parent: str, said: str) -> None:
    found = list(at_a_stop(variables, parent))
    assert len(found) == bool(said) and all(said in fact and remedy for fact, remedy in found)


def test_a_guard_writes_nothing_before_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "1")
    network = nn.Linear(2, 2)
    guard = mx.Guard(
        model=network, optimizer=torch.optim.SGD(network.parameters()), directory=tmp_path / "ckpt", prefix="p"
    )
    with pytest.raises(UsageError, match="RANK_ID=1, but no WORLD_SIZE"), guard:
        raise AssertionError("it must not train")
    assert not (tmp_path / "ckpt").exists() or not os.listdir(tmp_path / "ckpt")
