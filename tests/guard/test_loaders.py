"""Loops that fetch ahead, stopped by a real signal at every boundary: no batch is lost and none comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mindx_elastic.errors import GracefulExit
from tests.guard.loader_loops import FORMS, run_loop
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def check(form: str, directory: Path, stops: list[int] | None = None, **options: object) -> None:
    loop = FORMS[form]
    whole, weights = run_loop(loop, directory / "whole", **options)
    for stop in stops or range(1, len(whole.steps) + 1):
        at = directory / str(stop)
        with pytest.raises(GracefulExit) as caught:
            run_loop(loop, at, stop_at=stop, **options)
        first = caught.value.run  # type: ignore[attr-defined]
        second, resumed = run_loop(loop, at, **options)
        assert first.steps + second.steps == whole.steps, f"{form}, stopped at {stop}"
        assert all(torch.equal(weights[name], resumed[name]) for name in weights), f"{form}, stopped at {stop}"


@pytest.mark.parametrize("form", FORMS)
def test_every_boundary(form: str, tmp_path: Path) -> None:
    check(form, tmp_path)
