"""Makes ``*_pb2.py`` from the ``*.proto`` beside them: ``python -m tests.platforms.generate_proto [FOLDER]``.

protoc's version is exact (see pyproject.toml), so that everybody generates the same bytes. It is the oldest of the 5.x
line on purpose: what it writes runs on every protobuf from 5 on; newer ones write code that older runtimes refuse.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["PROTOS", "ROOT", "find_protoc", "generate"]

ROOT = Path(__file__).parents[2]
PROTOS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "mindx_elastic").rglob("*.proto"))


def find_protoc() -> Path:
    """The protoc of this environment; it may not exist."""
    return Path(sysconfig.get_path("scripts")) / "protoc"


def generate(proto: str, folder: Path) -> Path:
    """Write the Python code of `proto` (relative to `ROOT`) to the same place under `folder`, and return its path."""
    command = [str(find_protoc()), f"--proto_path={ROOT}", f"--python_out={folder}", str(ROOT / proto)]
    subprocess.run(command, check=True, timeout=60)
    return folder / proto.replace(".proto", "_pb2.py")


if __name__ == "__main__":
    for each in PROTOS:
        generate(each, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
