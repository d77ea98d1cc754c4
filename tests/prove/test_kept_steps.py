"""Steps that a process does again after a SIGKILL: what their comparison proves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import mindx_elastic as mx
from mindx_elastic.persist.format import read_header
from mindx_elastic.start.unused_state import proof_in_events

_KILLED = 14


def job(folder: Path, *, has_loss: bool, has_counter: bool, kills: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[int] = []
    with mx.Guard(model=model, optimizer=optimizer, directory=folder, snapshot_every=5) as guard:
        for step in guard.steps(16):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 2)).pow(2).mean()
            loss.backward()
            optimizer.step()
            if has_counter:
                seen.append(step)
            guard.step_end(**({"loss": loss} if has_loss else {}))
            if kills and step == _KILLED:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("has_loss", "has_counter", "proof"),
    [(True, False, "proved: step 14"), (True, True, "not got back: seen"), (False, False, "no resume of this job was")],
)
def test_what_was_not_compared_is_not_proved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_loss: bool, has_counter: bool, proof: str
) -> None:
    child = os.fork()
    if child == 0:
        job(tmp_path, has_loss=has_loss, has_counter=has_counter, kills=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    caplog.set_level("INFO", "mindx_elastic")
    job(tmp_path, has_loss=has_loss, has_counter=has_counter, kills=False)
    assert "done again" in caplog.text
    assert ("verified: " in caplog.text) == proof.startswith("proved")
    assert proof in proof_in_events(tmp_path)
    (path,) = tmp_path.glob("*_final.safetensors")
    (entry,) = read_header(path).info.certificate
    assert ('"verified"' in entry) == proof.startswith("proved")
