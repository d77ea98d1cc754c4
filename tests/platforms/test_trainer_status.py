"""Progress for Kubeflow Trainer: what is sent to a server that behaves like its own, and that nothing else is."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.config import TrainerSettings
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.trainer_status import JobProgress, TrainerReporter, status_body
from tests.harness import start_agent, wait_until

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/j/status"
TOKEN = "a.b.c"


class Handler(BaseHTTPRequestHandler):
    server: TrainerServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.hangs:
            self.server.closing.wait()
            return
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}" and self.path == PATH
        if allowed:
            self.server.bodies.append(json.loads(body))
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class TrainerServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[Any] = []
        self.hangs, self.closing = False, threading.Event()
        key, certificate, token = folder / "key.pem", folder / "ca.crt", folder / "token"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        token.write_text(f"{TOKEN}\n")
        url = f"https://127.0.0.1:{self.server_port}{PATH}"
        self.settings = TrainerSettings(url=url, token_file=str(token), ca_file=str(certificate))
        self.env = {
            "KUBEFLOW_TRAINER_SERVER_URL": url,
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate),
        }

    def handle_error(self, *_: Any) -> None:
        pass  # a client that does not trust the certificate


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrainerServer]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    (tmp_path / "pod").mkdir()
    made = TrainerServer(tmp_path / "pod")
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.closing.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("progress", "percentage", "left_s"),
    [
        (JobProgress(step=5), None, None),
        (JobProgress(step=-1, planned_steps=10), 0, None),
        (JobProgress(step=5, planned_steps=10, step_s=0.3), 50, 2),
        (JobProgress(step=10, planned_steps=10, step_s=1.0), 99, 0),
        (JobProgress(step=12, planned_steps=10, step_s=1.0), 99, 0),
        (JobProgress(step=1, planned_steps=10**12, step_s=9.0), 0, 2**31 - 1),
        (JobProgress(step=8, planned_steps=10, is_finished=True), 100, 0),
    ],
)
def test_what_is_sent(progress: JobProgress, percentage: int | None, left_s: int | None) -> None:
    found = status_body(progress, 1_760_000_000.0)["trainerStatus"]
    assert found["lastUpdatedTime"] == "2025-10-09T08:53:20Z"
    assert (found.get("progressPercentage"), found.get("estimatedRemainingSeconds")) == (percentage, left_s)
    metrics = {each["name"]: each["value"] for each in found["metrics"]}
    assert metrics["step"] == str(max(0, progress.step)) and all(isinstance(v, str) and v for v in metrics.values())


def test_the_newest_is_sent_and_the_last_one_at_the_end(server: TrainerServer) -> None:
    reporter = TrainerReporter(server.settings, period_s=3600.0)
    reporter.note(JobProgress(step=1))
    wait_until(lambda: bool(server.bodies), "the first report")
    for step in range(2, 50):
        reporter.note(JobProgress(step=step, loss=0.25))
    reporter.close()
    steps = [each["trainerStatus"]["metrics"][0]["value"] for each in server.bodies]
    assert steps == ["1", "49"], "one now, and one at the end"


@pytest.mark.parametrize("what", ["token", "certificate", "gone"])
def test_what_does_not_work_is_named_once(server: TrainerServer, caplog: pytest.LogCaptureFixture, what: str) -> None:
    settings = server.settings
    if what == "token":
        Path(settings.token_file).write_text("another")
    elif what == "certificate":
        settings = TrainerSettings(url=settings.url, token_file=settings.token_file)
    else:
        Path(settings.token_file).unlink()
    reporter = TrainerReporter(settings, period_s=0.01)
    for step in range(3):
        reporter.note(JobProgress(step=step))
        wait_until(lambda: bool(caplog.records), "a warning")
    reporter.close()
    assert not server.bodies
    (record,) = caplog.records
    words = {"token": "HTTP 403", "certificate": "certificate", "gone": "No such file"}
    assert words[what] in record.getMessage() and TOKEN not in record.getMessage()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": ""}, "KUBEFLOW_TRAINER_SERVER_URL is not set"),
        ({"token_file": ""}, "KUBEFLOW_TRAINER_SERVER_TOKEN is not set"),
        ({"url": "http://127.0.0.1/x"}, "no https address"),
        ({"url": "https://[x"}, "no https address"),
        ({"ca_file": "/is/not/there"}, "CA_CERT=/is/not/there cannot be used"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(changes: dict[str, str], words: str) -> None:
    content = {"url": "https://127.0.0.1/x", "token_file": "/token", **changes}
    with pytest.raises(UsageError, match=words):
        TrainerReporter(TrainerSettings(**content))


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.drill), ["--trainer-status"]])
def test_a_job_reports_only_where_it_is_asked_to(server: TrainerServer, tmp_path: Path, options: list[str]) -> None:
    args = [tmp_path / "ckpt", "--steps", "6", "--step-s", "0.05"]
    with start_agent("agent_guarded.py", *args, options=options, env=server.env, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert bool(server.bodies) is bool(options), job.report()
    if not options:
        return
    last = server.bodies[-1]["trainerStatus"]
    assert last["progressPercentage"] == 100
    metrics = {each["name"]: each["value"] for each in last["metrics"]}
    assert metrics.pop("loss") and metrics == {"step": "6", "attempts": "1", "failures": "0", "stepsLost": "0"}


@pytest.mark.drill
def test_a_server_that_hangs_holds_up_nothing(server: TrainerServer, tmp_path: Path) -> None:
    server.hangs = True
    args, options = [tmp_path / "ckpt", "--steps", "6"], ["--trainer-status"]
    with start_agent("agent_guarded.py", *args, options=options, env=server.env, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert job.matches("DONE 0 6") and not server.bodies
