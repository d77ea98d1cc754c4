"""The torch at hand: its version, its devices, and the places of its own that recoveries in place need."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mindx_elastic.core.printable import listed
from mindx_elastic.doctor.finding import Finding, good, problem, warning
from mindx_elastic.rejoin import groups

__all__ = ["Devices", "judge_devices", "look_at_software"]

_LEAST_TORCH = (2, 6)
_TRIED_TORCH = "2.13"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What the machine has, and what torch can use of it."""

    torch_cuda: str | None
    """The CUDA that torch was built with; None: without."""
    usable: int
    """GPUs that torch sees."""
    nodes: int
    """Device files of NVIDIA GPUs."""
    driver: bool
    """nvidia-smi is there."""


def look_at_software() -> Iterator[Finding]:
    """Versions and devices."""
    found = tuple(int(part) if part.isdecimal() else 0 for part in torch.__version__.split("+")[0].split(".")[:2])
    text = f"torch {torch.__version__}, Python {platform.python_version()}"
    if found < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        yield problem("torch", f"{text}: too old", f"pip install 'torch>={least}'")
    else:
        yield good("torch", text)
    yield from judge_devices(
        Devices(
            torch_cuda=torch.version.cuda,
            usable=torch.cuda.device_count() if torch.version.cuda else 0,
            nodes=len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]),
            driver=shutil.which("nvidia-smi") is not None,
        )
    )
    yield from _in_place()


def judge_devices(devices: Devices) -> Iterator[Finding]:
    """Whether torch can use the GPUs that are there."""
    has_gpu = devices.nodes > 0 or devices.driver
    if devices.usable:
        yield good("devices", f"{devices.usable} GPU{'s' * (devices.usable != 1)}, CUDA {devices.torch_cuda}")
        if devices.nodes > devices.usable:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "nvidia-smi tells"
            yield warning("devices", f"{devices.nodes} are there, torch sees {devices.usable}", f"see why: {why}")
    elif has_gpu and devices.torch_cuda is None:
        remedy = "install the build of torch for CUDA (pytorch.org, Get Started)"
        yield problem("devices", "this machine has a GPU, and this torch was built without CUDA", remedy)
    elif has_gpu:
        yield problem(
            "devices",
            f"this machine has a GPU, and torch (CUDA {devices.torch_cuda}) cannot use it",
            "nvidia-smi tells the driver's version; a torch for an older CUDA, or a newer driver",
        )
    else:
        yield good("devices", "no GPU; torch uses the processor")


def _in_place() -> Iterator[Finding]:
    remedy = "the job is restarted instead; in place: one of the versions of torch in docs/agent.md"
    if missing := groups.missing_calls():
        text = f"torch {torch.__version__} lacks {listed(missing, 6)}: --recover in-place is not possible"
        yield warning("in place", text, remedy)
        return
    tried = torch.__version__.startswith(f"{_TRIED_TORCH}.") or torch.__version__ == _TRIED_TORCH
    how = "" if tried else f" (it was tried with torch {_TRIED_TORCH})"
    yield good("in place", f"torch has all that --recover in-place needs{how}")
