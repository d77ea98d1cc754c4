"""``mindx-elastic manifest``: a job's manifest, with the numbers that fit each other."""

from __future__ import annotations

import shlex
from enum import Enum
from typing import Annotated

import typer

from mindx_elastic.cli.common import fail, parse_size

__all__ = ["ManifestKind", "manifest_command"]


class ManifestKind(str, Enum):
    """What runs the job."""

    KUBERNETES = "kubernetes"
    JOBSET = "jobset"
    TRAINER = "trainer"
    VOLCANO = "volcano"
    SLURM = "slurm"


def manifest_command(
    kind: Annotated[
        ManifestKind,
        typer.Argument(
            metavar="kubernetes|jobset|trainer|volcano|slurm", help="What runs the job; trainer is Kubeflow Trainer v2."
        ),
    ],
    command: Annotated[
        list[str], typer.Argument(metavar="-- PROGRAM [ARGUMENTS]", help="The training.", show_default=False)
    ],
    state: Annotated[str, typer.Option(metavar="SIZE", help="Of one rank's checkpoint file: 18GiB.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Of the job.")] = "train",
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Of the container.")] = "train:latest",
    nodes: Annotated[int, typer.Option(min=1, max=10000, metavar="N", help="Nodes.")] = 1,
    nproc: Annotated[
        int, typer.Option("--nproc-per-node", "--nproc", min=1, max=1024, metavar="N", help="Workers on each node.")
    ] = 1,
    gpus: Annotated[int, typer.Option(min=0, max=1024, metavar="N", help="GPUs of each node.")] = 0,
    grace: Annotated[float, typer.Option(min=0.5, max=86400, metavar="SECONDS", help="As run --grace.")] = 45.0,
    restarts: Annotated[int, typer.Option(min=0, max=1000, metavar="N", help="Failures that get new pods.")] = 3,
    claim: Annotated[str, typer.Option(metavar="NAME", help="Volume claim of the checkpoints.")] = "checkpoints",
    mount: Annotated[str, typer.Option(metavar="PATH", help="Where it is mounted.")] = "/checkpoints",
    faults: Annotated[str, typer.Option(metavar="NAME", help="ConfigMap with the platform's fault report.")] = "",
    run_options: Annotated[
        str, typer.Option(metavar="OPTIONS", help='Further options of mindx-elastic run: "--notice aws".')
    ] = "",
) -> None:
    """Print a manifest for a job under mindx-elastic run: exit codes, grace periods and shared memory fit each other.

    A graceful stop (143, 75) and an eviction cost none of the job's tries, wrong usage (2, 126, 127) is final.

    \b
    [bold]Examples[/bold]
    mindx-elastic manifest kubernetes --state 18GiB --nproc 8 --gpus 8 -- train.py /checkpoints | kubectl apply -f -
    mindx-elastic manifest slurm --state 2GiB --nproc 4 -- train.py ckpt > train.sbatch
    """
    from mindx_elastic.platforms.manifests import JobNumbers, manifest

    try:
        options = tuple(shlex.split(run_options))
    except ValueError as error:
        fail(f"--run-options {run_options}: {error}")
    numbers = JobNumbers(
        name=name,
        image=image,
        command=tuple(command),
        nodes=nodes,
        nproc=nproc,
        gpus=gpus,
        grace_s=grace,
        state_bytes=parse_size(state),
        restarts=restarts,
        claim=claim,
        mount=mount,
        faults=faults,
        run_options=options,
    )
    typer.echo(manifest(kind.value, numbers), nl=False)
