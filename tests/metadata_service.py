"""A metadata service of a cloud, as far as notices go."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["MetadataService"]

_TOKEN = "a-token"


class _Handler(BaseHTTPRequestHandler):
    server: MetadataService

    def do_PUT(self) -> None:
        good = self.path == "/latest/api/token" and "x-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self._reply(200 if good else 400, _TOKEN)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/latest") and self.headers.get("x-aws-ec2-metadata-token") != _TOKEN:
            return self._reply(401, "Unauthorized")
        if path.startswith("/metadata") and self.headers.get("Metadata") != "true":
            return self._reply(400, "Bad request")
        if path.startswith("/computeMetadata") and self.headers.get("Metadata-Flavor") != "Google":
            return self._reply(403, "Forbidden")
        said = self.server.answers.get(path)
        self._reply(404 if said is None else 200, said or "Not Found")

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        self.server.note_request()

    def log_message(self, *args: Any) -> None:
        pass


class MetadataService(ThreadingHTTPServer):
    """Use as a context manager. `answers`: the text at a path, 404 elsewhere; may be changed at any time."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, str] = {}
        self.base = f"http://127.0.0.1:{self.server_address[1]}"
        self._requests, self._more = 0, threading.Condition()

    def note_request(self) -> None:
        with self._more:
            self._requests += 1
            self._more.notify_all()

    def wait_for_requests(self, count: int) -> None:
        """Until `count` further ones have been answered."""
        with self._more:
            wanted = self._requests + count
            assert self._more.wait_for(lambda: self._requests >= wanted, 300.0)

    def __enter__(self) -> MetadataService:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *args: Any) -> None:
        pass  # a client that has gone meanwhile
