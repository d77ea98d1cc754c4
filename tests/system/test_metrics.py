"""``mindx-elastic run --metrics-port``: a real job, asked while it runs."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.harness import start_agent, wait_until

pytestmark = pytest.mark.slow


def test_a_running_job_says_where_it_stands_and_what_is_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "shm").mkdir()
    options = ["--metrics-port", "0"]
    script = ("agent_guarded.py", tmp_path / "ckpt", "--save-at", 3, "--spin-at", 5)
    env = {"MINDX_ARENA_DIR": str(tmp_path / "shm")}
    with start_agent(*script, options=options, env=env, run_dir=tmp_path / "run") as job:
        (url,) = (match[1] for match in job.wait_for(r"metrics: (http://127\.0\.0\.1:\d+/metrics)"))

        def asked() -> str:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return str(answer.read().decode())

        wait_until(lambda: 'mindx_step{rank="0"} 4.0' in asked(), "the fourth step")
        text = asked()
    assert 'mindx_steps_total{rank="0"} 4.0' in text and 'mindx_durable_step{rank="0"} 3.0' in text, text
    assert "mindx_workers 1.0" in text and "mindx_attempts_total 1.0" in text, text
    written = next(line for line in text.splitlines() if line.startswith("mindx_durable_bytes_total{"))
    assert float(written.rsplit(" ", 1)[1]) == sum(f.stat().st_size for f in (tmp_path / "ckpt").glob("*.safetensors"))
