"""A metadata service of a cloud, as far as notices go, and what stands in its place when something is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = [
    "AWS_ACTION",
    "AZURE_EVENTS",
    "AZURE_NAME",
    "GCE",
    "MetadataServer",
    "hang",
    "reply",
]

AWS_ACTION = "/latest/meta-data/spot/instance-action"
AZURE_EVENTS = "/metadata/scheduledevents"
AZURE_NAME = "/metadata/instance/compute/name"
GCE = "/computeMetadata/v1/instance/preempted"
_TOKEN = "a-token"

Behaviour = Callable[["Handler"], None]


def reply(body: str | bytes = b"", status: int = 200, headers: Mapping[str, str] | None = None) -> Behaviour:
    """Answer so."""
    data = body.encode() if isinstance(body, str) else body

    def answer(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def hang(handler: Handler) -> None:
    """Never answer."""
    handler.server.closing.wait()


class Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.note(f"{self.command} {self.path}")
        if path == "/latest/api/token" and path not in self.server.answers:
            good = self.command == "PUT" and "x-aws-ec2-metadata-token-ttl-seconds" in self.headers
            return reply(self.server.token if good else "", 200 if good else 400)(self)
        if path.startswith("/latest/meta-data") and self.headers.get("x-aws-ec2-metadata-token") != self.server.token:
            return reply("Unauthorized", 401)(self)
        if path.startswith("/metadata/") and self.headers.get("Metadata") != "true":
            return reply("Bad request", 400)(self)
        if path == GCE and self.headers.get("Metadata-Flavor") != "Google":
            return reply("Forbidden", 403)(self)
        self.server.answers.get(path, reply("Not Found", 404))(self)

    def log_message(self, *args: Any) -> None:
        pass


class MetadataServer(ThreadingHTTPServer):
    """Use as a context manager. `answers`: what happens at a path; a 404 elsewhere. May be changed at any time."""

    daemon_threads, block_on_close = True, False

    def __init__(self, answers: Mapping[str, Behaviour] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = dict(answers or {})
        self.token = _TOKEN
        self.closing = threading.Event()
        self.requests: list[str] = []
        self._more = threading.Condition()
        self.base = f"http://127.0.0.1:{self.server_address[1]}"

    def note(self, request: str) -> None:
        with self._more:
            self.requests.append(request)
            self._more.notify_all()

    def wait_for_requests(self, count: int, path: str = "") -> None:
        """Until `count` further requests for `path` have come."""
        with self._more:
            wanted = self._count(path) + count
            assert self._more.wait_for(lambda: self._count(path) >= wanted, 300.0), f"no request for {path}"

    def _count(self, path: str) -> int:
        return sum(path in request for request in self.requests)

    def __enter__(self) -> MetadataServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *args: Any) -> None:
        pass  # a client that has gone meanwhile
