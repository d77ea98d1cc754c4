"""The pages under docs/ as a site (`make docs`): it builds strictly, needs no network, and its new pages are true."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindx_elastic.cli.main import main
from tests.watchdog import finish

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MKDOCS = os.environ.get("MINDX_MKDOCS", sys.executable)
"""A Python that has the extra [docs], where this one has not."""
has_mkdocs = "MINDX_MKDOCS" in os.environ or bool(
    importlib.util.find_spec("material") and importlib.util.find_spec("mkdocstrings")
)


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.skipif(not has_mkdocs, reason="the extra [docs] is not installed")
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Strictly: a link without its page or heading, a page outside of the navigation, a name without docstring."""
    site = tmp_path / "site"
    command = [MKDOCS, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = finish(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "reference.html", "operating.html", "changelog.html"} <= {page.name for page in pages}
    loaded = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
    outside = {found for page in pages for found in loaded.findall(page.read_text(encoding="utf-8"))}
    assert not outside
    assert (site / "search" / "search_index.js").is_file(), "pages that are opened from files can be searched"
    assert all("js/iframe-worker.js" in page.read_text(encoding="utf-8") for page in pages)
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not [found for text in styles for found in re.findall(r"(?:url\(|@import )['\"]?https?://[^)'\"]+", text)]
    assert not [page.name for page in pages if 'class="mermaid"' in page.read_text(encoding="utf-8")], "it is fetched"


def test_the_extra_and_the_requirements_of_the_site_are_the_same() -> None:
    lines = (ROOT / "requirements" / "docs.txt").read_text(encoding="utf-8").splitlines()
    extra = re.search(r"^docs = \[(.*?)\]( #|$)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert extra
    assert re.findall(r'"([^"]+)"', extra[1]) == [line for line in lines if not line.startswith("#")]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert not [page.name for page in DOCS.glob("*.md") if page.name not in navigation]


def test_the_reference_has_every_public_name() -> None:
    page = set(re.findall(r"^::: (\S+)$", text_of("reference.md"), re.MULTILINE))
    for line in page:
        module, _, name = line.rpartition(".")
        assert re.search(rf"^(class|def) {name}\b", source_of(module), re.MULTILINE), line
    surface = (ROOT / "tests" / "data" / "surface" / "names.txt").read_text(encoding="utf-8")
    public = re.findall(r"^(?:class|def) (\w+)", surface, re.MULTILINE)
    assert not [name for name in public if name not in {line.rpartition(".")[2] for line in page}]


def source_of(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def test_the_messages_of_the_operating_page_are_in_the_source() -> None:
    """A person searches the page for the line in the log."""
    messages = re.search(r"^By message:\n(.*?)^A lost node", text_of("operating.md"), re.DOTALL | re.MULTILINE)
    assert messages
    cells = [line.split(" | ")[0] for line in messages[1].splitlines() if line.startswith("| `")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if text != "clean"]
    assert len(quoted) > 12
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mindx_elastic").rglob("*.py"))
    assert not [text for text in quoted if text not in source]


def test_the_commands_of_the_pages_are_understood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each `mindx-elastic COMMAND OPTIONS` of a page has a command and options that exist."""
    commands: set[str] = set()
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if line.startswith("    mindx-elastic ")]
        found = [*re.findall(r"`(mindx-elastic [a-z]+[^`]*)`", text), *lines]
        commands |= {line.partition("#")[0].partition("|")[0].partition(">")[0].strip() for line in found}
    help_texts = {"": "--help"}
    for words in map(shlex.split, sorted(commands)):
        end = next((at for at, word in enumerate(words) if word == "--" or word.endswith(".py")), len(words))
        options = [word.partition("=")[0] for word in words[2:end] if word.startswith("--")]
        also = "run" if words[1] in ("prove", "drill") else ""
        for command in {words[1], also} - help_texts.keys():
            help_texts[command] = help_of(command, monkeypatch, capsys)
        assert not [option for option in options if option not in help_texts[words[1]] + help_texts[also]], words


def help_of(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["mindx-elastic", command, "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None), command
    return capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("page", ["../README.md", "index.md", "trainers.md"])
def test_the_program_of_a_page_stops_and_goes_on(tmp_path: Path, page: str) -> None:
    text, *_ = re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)
    number, code = (signal.SIGINT, 130) if page == "index.md" else (signal.SIGTERM, 143)
    (tmp_path / "train.py").write_text(text.replace("time.sleep(0.1)", "pass"), encoding="utf-8")
    stopping = text.replace("time.sleep(0.1)", f"guard.step == 20 and os.kill(os.getpid(), {int(number)})")
    (tmp_path / "stopped.py").write_text(stopping.replace("import sys\n", "import os\nimport sys\n"), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(script: str, directory: str) -> subprocess.CompletedProcess[str]:
        return finish([sys.executable, "-W", "error", script, directory], cwd=tmp_path, env=env, fresh=False)

    straight = run("train.py", "straight")
    assert straight.returncode == 0, straight.stderr
    if "guard.step_end" in text:
        stopped = run("stopped.py", "ckpt")
        assert stopped.returncode == code, stopped.stderr
    again = run("train.py", "ckpt")
    assert again.returncode == 0, again.stderr
    last = [each.stdout.splitlines()[-1].partition(" - ") for each in (straight, again)]
    assert last[0][2] == last[1][2] and last[0][0] == "resumed from step None"
    assert ("guard.step_end" in text) == (last[1][0] != "resumed from step None")


@pytest.mark.drill
def test_the_start_page_s_job_of_two_ranks_outlives_a_killed_one(tmp_path: Path) -> None:
    """Its lines in front of the guard, and a SIGKILL to rank 1: it starts again by itself, with the same end."""
    text, lines = re.findall(r"```python\n(.*?)```", text_of("index.md"), re.DOTALL)
    job = text.replace("guard = ", f"import os, signal\n{lines}guard = ", 1)
    mortal = "guard.step == 20 and os.environ['TORCHELASTIC_RESTART_COUNT'] + os.environ['RANK'] == '01'"
    (tmp_path / "ddp.py").write_text(job.replace("time.sleep(0.1)", "pass"), encoding="utf-8")
    killed = job.replace("time.sleep(0.1)", f"{mortal} and os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "killed.py").write_text(killed, encoding="utf-8")
    ends = []
    for script in ("ddp.py", "killed.py"):
        words = ["run", "--nproc-per-node", "2", script, Path(script).stem]
        command = [sys.executable, "-W", "error", "-m", "mindx_elastic", *words]
        done = finish(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        assert ("killed by SIGKILL" in done.stderr) == (script == "killed.py")
        last = [line.partition(" - ") for line in done.stdout.splitlines()[-2:]]
        assert [begin for begin, _, _ in last] == [f"resumed from step {20 if script == 'killed.py' else None}"] * 2
        ends += [end for _, _, end in last]
    assert len(set(ends)) == 1


def test_the_recorded_sessions_of_the_readme_end_with_the_same_weights() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sums = re.findall(r"^resumed from step .* sum of the weights (\S+)$", readme, re.MULTILINE)
    assert len(sums) == 3 and len(set(sums)) == 1
    hashes = re.findall(r"^([0-9a-f]{64})  (?:straight|killed)\.safetensors$", readme, re.MULTILINE)
    assert len(hashes) == 2 and len(set(hashes)) == 1
