"""Launchers whose variables are not read: what is refused, and what must not be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.launchers import current_ranks, refusal

# As Slurm 22.05 sets them.
SLURM_ALLOCATION = {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_TASKS_PER_NODE": "2"}
SLURM_BATCH = {**SLURM_ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SLURM_STEP = {**SLURM_BATCH, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}

SEVERAL = [
    ({"RANK_ID": "1"}, "RANK_ID=1,"),
    ({"RANK_ID": "0", "RANK_SIZE": "8"}, "RANK_ID=0, RANK_SIZE=8,"),
    ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "h"}, "MS_ROLE=MS_WORKER, MS_WORKER_NUM=2,"),
    ({"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "1"}, "MS_ROLE=MS_SCHED, MS_WORKER_NUM=1,"),
    ({"MS_WORKER_NUM": "4"}, "MS_WORKER_NUM=4,"),
    (SLURM_STEP, "SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1,"),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_RANK=3,"),
    ({**SLURM_STEP, "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4,"),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2, PMI_RANK=0,"),
    ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE=2,"),
    ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, "HOROVOD_SIZE=2, HOROVOD_RANK=1,"),
    ({"RANK_ID": "1", "WORLD_SIZE": " "}, "RANK_ID=1,"),
]
SINGLE: list[dict[str, str]] = [
    {},
    SLURM_ALLOCATION,  # a notebook in salloc
    SLURM_BATCH,  # a batch script that starts one process
    {**SLURM_BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
    {"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "0"},
    {"MS_WORKER_NUM": "1"},
    {"MS_WORKER_NUM": ""},
    {"RANK_ID": "", "MS_ROLE": " "},
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    {**SLURM_STEP, "OMPI_COMM_WORLD_SIZE": "1"},  # mpirun -n 1, whose daemons were started by srun
    {**SLURM_STEP, "WORLD_SIZE": "1"},  # each task a job of its own
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
    assert "mindx-elastic run" in said and "WORLD_SIZE=1" in said and "init_process_group" in said


def test_the_way_out_of_srun_is_a_command() -> None:
    said = refusal(SLURM_STEP)
    assert "srun --ntasks-per-node=1 mindx-elastic run --nnodes $SLURM_NNODES " in said
    assert "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID" in said


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


def test_a_guard_writes_nothing_before_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "1")
    network = nn.Linear(2, 2)
    guard = mx.Guard(
        model=network, optimizer=torch.optim.SGD(network.parameters()), directory=tmp_path / "ckpt", prefix="p"
    )
    with pytest.raises(UsageError, match="RANK_ID=1, but no WORLD_SIZE"), guard:
        raise AssertionError("it must not train")
    assert not (tmp_path / "ckpt").exists() or not os.listdir(tmp_path / "ckpt")


def test_model_refuses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    network = nn.Linear(2, 2)
    model = mx.Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters()))
    data: Any = [(torch.zeros(1, 2), torch.zeros(1, 2))]
    callback = mx.ExceptionCheckpoint(prefix="p", directory=str(tmp_path / "ckpt"))
    loader = torch.utils.data.DataLoader(data)
    with pytest.raises(UsageError, match="MS_ROLE=MS_WORKER, MS_WORKER_NUM=2, but no WORLD_SIZE"):
        model.train(1, loader, callbacks=[callback])
    assert not (tmp_path / "ckpt").exists() or not os.listdir(tmp_path / "ckpt")
