"""The wheel: that both ways to build it give the same one, what is in it, and that it works where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from mindx_elastic._version import __version__
from tests.environments import ROOT, SCRIPT, Environment, build_wheel, copy_source, make_environment, run

pytestmark = pytest.mark.slow

NAME = f"mindx_elastic-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with ``pip wheel``."""
    source = copy_source(tmp_path_factory.mktemp("pip wheel") / "source")
    done = build_wheel(source, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (source / "dist").iterdir()] == [NAME]
    return source / "dist" / NAME


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def read_metadata(wheel: Path) -> Message:
    return Parser().parsestr(contents(wheel)[f"mindx_elastic-{__version__}.dist-info/METADATA"].decode())


@pytest.mark.drill
def test_setup_py_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    done = build_wheel(source, "setup.py", "bdist_wheel")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (source / "dist").iterdir()] == [NAME]
    assert contents(source / "dist" / NAME) == contents(wheel)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mindx_elastic").rglob("*") if path.is_file()}
    expected = {name for name in source if "__pycache__" not in name}
    packed = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert packed == expected
    assert "mindx_elastic/py.typed" in packed


def test_metadata(wheel: Path) -> None:
    metadata = read_metadata(wheel)
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    requires = metadata.get_all("Requires-Dist") or []
    assert "torch>=2.6" in requires
    always = {re.split(r"[^\w-]", text)[0] for text in requires if "extra ==" not in text}
    assert always == {"torch", "numpy", "safetensors", "protobuf", "jinja2", "xxhash", "typer", "rich"}
    assert any("licenses/LICENSE" in name for name in contents(wheel))


def test_the_pinned_torch_satisfies_the_wheel() -> None:
    pins = [
        line for line in (ROOT / "requirements" / "torch-cpu.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    assert len(pins) == 1 and re.fullmatch(r"torch==\d+\.\d+\.\d+", pins[0])


def test_every_make_target_is_sound() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    text = (ROOT / "Makefile").read_text()
    declared = next(line for line in text.splitlines() if line.startswith(".PHONY:")).split()[1:]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = run(["make", "--dry-run", f"PYTHON={sys.executable}", *declared], cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment in which ``ma_pre_start.sh`` has installed the real wheel; every path has a space in it."""
    place = tmp_path_factory.mktemp("a platform's machine")
    environment = make_environment(place, everything=True)
    job = place / "job code"
    job.mkdir()
    shutil.copy2(wheel, job)
    shutil.copy2(SCRIPT, job)
    command = ["bash", "-c", 'set -eu; source "$1/ma_pre_start.sh"; mindx-elastic --version', "job", str(job)]
    done = run(command, cwd=place, env=environment.variables())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mindx-elastic", __version__]
    return environment


@pytest.mark.drill
def test_the_installed_package_works(installed: Environment) -> None:
    code = "import mindx_elastic.terminating_message as m; m.ExceptionCheckpoint; print(m.__file__)"
    done = installed.run_python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed.prefix)


def test_the_installed_command_explains_itself(installed: Environment) -> None:
    done = run([installed.prefix / "bin" / "mindx-elastic", "--help"], cwd=installed.home, env=installed.variables())
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout and "verify" in done.stdout
