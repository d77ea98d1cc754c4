"""``ma_pre_start.sh``, run as a platform would, on small wheels: where it installs, what it says and leaves alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.environments import SCRIPT, make_environment, run, write_wheel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bash") is None, reason="no bash"),
]

Result = subprocess.CompletedProcess[str]
DEFAULTS = ["MS_ENABLE_GRACEFUL_EXIT=1", "PYTHONUNBUFFERED=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]


class Machine:
    """A machine with one Python environment and a job folder that holds the script; both have spaces in their path."""

    def __init__(self, place: Path, *, user_site: bool = False) -> None:
        self.place = place
        self.environment = make_environment(place / "one machine", user_site=user_site)
        self.job = place / "job code"
        self.job.mkdir()
        self.script = Path(shutil.copy2(SCRIPT, self.job))
        self.prefix: Sequence[str] = ()
        """A command in front of every other, that takes rights away."""

    def execute(self, *arguments: str | Path, shell: str = "bash", **env: str) -> Result:
        command = [*self.prefix, shell, str(self.script), *map(str, arguments)]
        return run(command, cwd=self.place, env=self.environment.variables(**env))

    def bash(self, text: str, **env: str) -> Result:
        """Run a bash program, in which ``$S`` is the script."""
        variables = self.environment.variables(S=str(self.script), **env)
        return run([*self.prefix, "bash", "-c", text], cwd=self.place, env=variables)

    def version(self, **env: str) -> str:
        """The version that the environment's Python imports, or the error that it meets."""
        done = self.environment.run_python("-c", "import mindx_elastic; print(mindx_elastic.__version__)", **env)
        return (done.stdout or done.stderr).strip().splitlines()[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def assert_fails(done: Result, *said: str) -> None:
    """One clear line, nothing that a caller would evaluate, no traceback."""
    assert done.returncode not in (0, 127)
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ma_pre_start: ERROR: ")]
    assert len(errors) == 1, done.stderr
    assert [text for text in said if text not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.drill
def test_installs_and_prints_exports(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0")
    done = machine.execute()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[1:]) == [f"export {line}" for line in DEFAULTS]
    assert lines[0].startswith("export PATH=") and lines[0].endswith("/environment/bin:/usr/bin:/bin")
    assert machine.version() == "0.1.0"


@pytest.mark.drill
def test_two_runs_at_once(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0")
    command = ["bash", str(machine.script)]
    env = machine.environment.variables()
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"]
    outputs = [process.communicate(timeout=120) for process in runs]
    assert [process.returncode for process in runs] == [0, 0], outputs
    assert machine.version() == "0.1.0"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("versions", "newest"),
    [
        (["0.9.0", "0.10.0", "0.2.0"], "0.10.0"),
        (["1.0.0rc1", "1.0.0.dev5", "0.9"], "1.0.0rc1"),
        (["1.0.0", "1.0.0.post1"], "1.0.0.post1"),
    ],
)
def test_takes_the_newest_version(machine: Machine, versions: list[str], newest: str) -> None:
    for version in versions:
        write_wheel(machine.job, version)
    (machine.job / "mindx_elastic-99.0-cp311-cp311-linux_x86_64.whl").touch()
    (machine.job / "mindx_elastic-none-py3-none-any.whl").touch()
    (machine.job / "another-99.0-py3-none-any.whl").touch()
    done = machine.execute()
    assert done.returncode == 0, done.stderr
    assert machine.version() == newest
    assert f"{len(versions)} wheels" in done.stderr and done.stderr.count("skipping") == 2


# --- where the wheel is ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ["no mindx_elastic-<version>-py3-none-any.whl in", "job code"]),
        (["missing"], ["'missing' is not a folder"]),
    ],
)
def test_wrong_folders(machine: Machine, arguments: list[str], said: list[str]) -> None:
    assert_fails(machine.execute(*arguments), *said)


# --- wheels that are no good ---


def truncated(wheel: Path) -> None:
    os.truncate(wheel, wheel.stat().st_size // 2)


def bit_flipped(wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[data.index(b"__init__.py") + len(b"__init__.py") + 4] ^= 0x10
    wheel.write_bytes(data)


def of_another_version(wheel: Path) -> None:
    write_wheel(wheel.parent, "0.2.0", version_inside="0.3.0")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        bit_flipped,
        of_another_version,
    ],
)
def test_a_broken_wheel_is_named_and_changes_nothing(machine: Machine, damage: Callable[[Path], None]) -> None:
    write_wheel(machine.job, "0.1.0")
    machine.execute()
    damage(write_wheel(machine.job, "0.2.0"))
    assert_fails(machine.execute(), "mindx_elastic-0.2.0-py3-none-any.whl' is broken", "copy it again")
    assert machine.version() == "0.1.0"


def test_a_wheel_that_does_not_import(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0", body="import no_such_module")
    assert_fails(machine.execute(), "ModuleNotFoundError: No module named 'no_such_module'", "cannot be used by")


# --- what the wheel needs ---


@pytest.mark.drill
def test_torch_is_never_installed(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0", requires=["torch>=2.6"])
    write_wheel(machine.job, "2.13.0", name="torch")
    env = {"PIP_FIND_LINKS": f"'{machine.job}'"}
    assert_fails(machine.execute(**env), "has no torch", "needs torch>=2.6", "that fits this machine")
    (machine.environment.site_packages / "torch-2.4.1.dist-info").mkdir()
    (machine.environment.site_packages / "torch-2.4.1.dist-info" / "METADATA").write_text(
        "Name: torch\nVersion: 2.4.1\n"
    )
    assert_fails(machine.execute(**env), "has torch 2.4.1", "needs torch>=2.6")
    (machine.environment.site_packages / "torch-2.4.1.dist-info" / "METADATA").write_text(
        "Name: torch\nVersion: 2.7.0a0+cu\n"
    )
    assert machine.execute(**env).returncode == 0


def test_a_python_that_will_not_do(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0")
    old = machine.place / "old python"
    old.write_text("#!/bin/sh\necho 3.9; exit 1\n")
    old.chmod(0o755)
    assert_fails(machine.execute(PYTHON=str(old)), "is Python 3.9; 3.10 or newer is needed")
    assert_fails(machine.execute(PYTHON="no-such-python"), "PYTHON='no-such-python' is not a program")
    (machine.environment.site_packages / "links.pth").unlink()
    done = machine.execute()
    assert_fails(done, "has no pip")
    remedy = done.stderr.partition("has no pip; ")[2]
    assert remedy.startswith(("run: ", "install your system's python3")) and "--user" not in remedy, "no such in a venv"


# --- what Python says by itself ---


@pytest.mark.drill
def test_without_a_wheel_what_is_installed_will_do(machine: Machine) -> None:
    wheel = write_wheel(machine.job, "0.1.0")
    machine.execute()
    wheel.unlink()
    done = machine.bash('source "$S"; echo "status $? $MS_ENABLE_GRACEFUL_EXIT"; type -p mindx-elastic')
    assert done.stdout.startswith("status 0 1\n") and done.stdout.endswith("mindx-elastic\n"), done.stderr
    assert "taking what is installed" in done.stderr and "mindx_elastic 0.1.0 was installed already" in done.stderr
    assert_fails(machine.execute(str(machine.place)), "no mindx_elastic-<version>-py3-none-any.whl in")
    (machine.environment.site_packages / "mindx_elastic" / "__init__.py").write_text("import gone\n")
    assert_fails(machine.execute(), "mindx_elastic 0.1.0 is installed but cannot be used")


# --- sourced ---

STATE = "set +o; shopt; trap; compgen -A function; compgen -v; pwd; echo $#"


@pytest.mark.drill
def test_sourcing_sets_the_environment_and_nothing_else(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0")
    done = machine.bash(f'a=; b=; a=$({STATE}); source "$S"; b=$({STATE}); diff <(echo "$a") <(echo "$b"); env')
    added = [line for line in done.stdout.splitlines() if line.startswith(("<", ">"))]
    assert added == [f"> {line.partition('=')[0]}" for line in DEFAULTS], done.stderr
    assert [line for line in DEFAULTS if line not in done.stdout.splitlines()] == []
    assert "mindx-elastic" in machine.bash('source "$S"; type mindx-elastic').stdout


def test_sourcing_by_a_strict_script_with_arguments_of_its_own(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0")
    done = machine.bash(
        'set -euo pipefail; set -f -o noclobber; IFS=:; set -- --epochs "job code"; source "$S"; echo "$2"'
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "job code\n"


def test_a_failure_returns_and_leaves_the_shell_alive(machine: Machine) -> None:
    done = machine.bash('source "$S"; echo "status $?"; env | grep -c ^MS_; compgen -A function; echo alive')
    assert done.stdout.split("\n") == ["status 1", "0", "alive", ""], done.stderr
    strict = machine.bash('set -eu; source "$S" || echo "status $?"; echo alive')
    assert strict.stdout == "status 1\nalive\n"


# --- where it installs ---


def without_rights() -> Sequence[str]:
    """A prefix that makes permission bits count; root passes over them."""
    if os.geteuid() != 0:
        return ()
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    if (
        shutil.which("setpriv") is None
        or subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("runs as root and cannot give up root's rights")
    return prefix


def lock(machine: Machine) -> None:
    """Nobody may write to the environment of the machine any more."""
    machine.prefix = without_rights()
    for folder in (machine.environment.site_packages, machine.environment.prefix / "bin"):
        folder.chmod(0o555)


@pytest.mark.drill
def test_installs_for_the_user_where_python_is_read_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user_site=True)
    write_wheel(machine.job, "0.1.0")
    lock(machine)
    done = machine.bash('source "$S" && type -p mindx-elastic')
    assert done.returncode == 0, done.stderr
    assert "cannot be written to; installing for this user only" in done.stderr
    assert done.stdout.strip() == str(machine.environment.home / ".local" / "bin" / "mindx-elastic")
    assert machine.version() == "0.1.0"
    again = machine.execute()
    assert again.returncode == 0 and "was installed already" in again.stderr
    assert "PYTHONPATH" not in again.stdout


def test_nowhere_to_install(machine: Machine) -> None:
    write_wheel(machine.job, "0.1.0")
    lock(machine)
    for folder in (machine.environment.home, machine.job):
        folder.chmod(0o555)
    assert_fails(machine.execute(), "nowhere to install", "set MINDX_INSTALL_DIR")
    locked = str(machine.environment.home / "x")
    assert_fails(machine.execute(MINDX_INSTALL_DIR=locked), f"MINDX_INSTALL_DIR='{locked}' cannot be written to")
