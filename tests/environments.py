"""Fresh Python environments and wheels for the packaging tests, made without any download."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.watchdog import finish

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "ma_pre_start.sh"


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, which sees chosen packages of the one that runs the tests."""

    prefix: Path
    home: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next((self.prefix / "lib").glob("python3*/site-packages"))

    def variables(self, **more: str) -> dict[str, str]:
        """A platform's plain environment: nothing of this machine's settings, and no index to download from."""
        plain = {"HOME": str(self.home), "PATH": "/usr/bin:/bin", "PYTHON": str(self.python), "PIP_NO_INDEX": "1"}
        return {**plain, **more}

    def run_python(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return run([str(self.python), *arguments], cwd=self.home, env=self.variables(**more))


def run(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return finish(command, cwd=cwd, env=env)


def make_environment(folder: Path, *, everything: bool = False, user_site: bool = False) -> Environment:
    """A virtual environment with pip; with `everything`, also torch and what else runs the tests, but not this package.

    `everything`: the packages are links in a folder that a ``.pth`` file names. pip finds them installed, and installs
    nothing over them. `user_site`: one in which pip's ``--user`` works, as in a plain system Python.
    """
    prefix, home, links = folder / "environment", folder / "home", folder / "links"
    home.mkdir(parents=True)
    links.mkdir()
    options = ["--without-pip", *(["--system-site-packages"] if user_site else [])]
    subprocess.run([sys.executable, "-m", "venv", *options, str(prefix)], check=True)
    for source in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in source.iterdir():
            wanted = everything or entry.name == "pip"
            ours = "mindx_elastic" in entry.name or entry.suffix == ".pth" or entry.name == "__pycache__"
            if wanted and not ours:
                (links / entry.name).symlink_to(entry)
    made = Environment(prefix, home)
    (made.site_packages / "links.pth").write_text(f"{links}\n")
    return made


def write_wheel(
    folder: Path,
    version: str,
    *,
    name: str = "mindx_elastic",
    body: str = "",
    requires: Sequence[str] = (),
    build: str = "",
    version_inside: str | None = None,
) -> Path:
    """A small wheel with one package, whose ``__init__`` is `body`, and the console command ``mindx-elastic``."""
    folder.mkdir(parents=True, exist_ok=True)
    dist_info = f"{name}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {text}\n" for text in requires)
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n{textwrap.dedent(body)}\n",
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version_inside or version}\n{needed}",
        f"{dist_info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{dist_info}/entry_points.txt": "[console_scripts]\nmindx-elastic = mindx_elastic:main\n",
    }
    record = f"{dist_info}/RECORD"
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}\n")
    files[record] = "".join([*lines, f"{record},,\n"])
    wheel = folder / f"{name}-{version}{build and '-' + build}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def copy_source(folder: Path) -> Path:
    """What a build needs, in a folder of its own: building leaves files that the working tree should not have."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    shutil.copytree(ROOT / "mindx_elastic", folder / "mindx_elastic", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def build_wheel(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the building Python with `arguments` in `source`; no index is asked for anything."""
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return run([sys.executable, *arguments], cwd=source, env=env)
