"""Where a rehearsal is left out, in this very process; real ones: `tests.system.test_rehearsal`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.guarded import STEPS_PER_EPOCH, Job, no_traces, plain_environment


@pytest.mark.parametrize(
    ("options", "variables", "told"),
    [
        ({"resume": "never"}, {"MINDX_REHEARSE_EXIT": "1"}, 'it needs Guard(resume="auto")'),
        ({}, {"TORCHELASTIC_MAX_RESTARTS": "0"}, "torchrun has no restart left for it"),
        ({}, {}, "nothing is known to start the job again; use mindx-elastic run"),
        ({}, {"MINDX_REHEARSED": "3", "MINDX_REHEARSE_EXIT": "1"}, "was rehearsed at step 3, and goes on from step 0"),
    ],
)
def test_it_is_left_out_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    variables: dict[str, str],
    told: str,
) -> None:
    plain_environment(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with no_traces():
        job = Job(tmp_path, rehearse=3, **options)
        job.run()
    assert job.steps[-1] == 3 * STEPS_PER_EPOCH
    assert [r.getMessage() for r in caplog.records if "no rehearsal: " in r.getMessage() and told in r.getMessage()]
