"""``loop.py`` with an archive at ``stall://PATH``, a folder where the upload of step STALL_AT writes half of the file
and then waits for ever; or at ``broken://``, which cannot be listed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.jobs.kit import say


class Stalling(LocalFileSystem):  # type: ignore[misc]
    protocol = ("stall",)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **more: Any) -> None:
        if f"-{os.environ['STALL_AT']}/" not in rpath:
            super().put_file(lpath, rpath, **more)
            return
        data = Path(lpath).read_bytes()
        Path(rpath).write_bytes(data[: len(data) // 2])
        say("STALLED")
        threading.Event().wait()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("stall://")))


class Broken(LocalFileSystem):  # type: ignore[misc]
    """Like an endpoint that does not answer."""

    protocol = ("broken",)

    def find(self, *args: Any, **more: Any) -> Any:
        raise ConnectionError("no route to host")


if __name__ == "__main__":
    fsspec.register_implementation("stall", Stalling)
    fsspec.register_implementation("broken", Broken)
    loop = Path(__file__).with_name("loop.py")
    exec(compile(loop.read_bytes(), str(loop), "exec"), globals())  # noqa: S102
