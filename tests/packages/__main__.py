"""``python -m tests.packages [NAME ...]``: runs the parts of these packages, or of all, and prints the table."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.packages.part import Part, read_parts

_PARTS = [part for path in sorted(Path(__file__).parent.glob("*.txt")) for part in read_parts(path)]
_ROOT = Path(__file__).parents[2]
_STOP = 12
"""Of 24 steps in 3 epochs: in the middle of the second one."""
_MOST_S = 300
_LONGEST = 170
_OWN = re.compile(r"SIGTERM heard|Graceful exit|ends after the step")
_TOLD = re.compile(r"^SAID (?:WARNING|ERROR) (.*)|^SAID INFO verified: .*; (not as they were: .*)", re.M)
_REFUSAL = re.compile(r"mindx_elastic\.errors\.\w+: (.*)")


def _run(script: Path, directory: str, stop: int = 0) -> tuple[str, int]:
    """As ``python train.py DIRECTORY``; a real SIGTERM in step `stop`, heard before the step ends."""
    command = [sys.executable, str(_ROOT / "tests/natural/run.py"), str(stop), str(script), directory]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MINDX_GRACE_S": "120", "COLUMNS": "500", "NO_COLOR": "1"}
    env["PYTHONPATH"] = str(_ROOT)
    done = subprocess.run(
        command,
        cwd=script.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_MOST_S,
        check=False,
    )
    return done.stdout.decode(errors="replace"), done.returncode


def _judge(part: Part, folder: Path) -> tuple[str, str]:
    """``equal``, ``refused``, ``told``, ``silent``, or ``failed``: the program by itself did not run; and what is
    said."""
    script = folder / "train.py"
    script.write_text(part.source(), encoding="utf-8")
    straight, code = _run(script, "straight")
    if code:
        refused = _REFUSAL.findall(straight)
        return ("refused", refused[-1]) if refused else ("failed", _last_line(straight))
    stopped, code = _run(script, "stopped", _STOP)
    said = _said(straight + stopped)
    if code != 143:
        return "told" if said else "failed", said or f"stopped: exit code {code}: {_last_line(stopped)}"
    resumed, code = _run(script, "stopped")
    said = _said(straight + stopped + resumed)
    if code:
        return "failed at the resume", (_REFUSAL.findall(resumed) or [_last_line(resumed)])[-1]
    if "SAID INFO resumed from" not in resumed:
        return "not saved", said
    ends = [re.findall(r"^(?:WEIGHTS|STEPS) .*", output, re.M) for output in (straight, resumed)]
    return ("equal" if ends[0] == ends[1] else "told" if said else "silent"), said


def _said(output: str) -> str:
    found = [warning or fact for warning, fact in _TOLD.findall(output)]
    return " / ".join(dict.fromkeys(text for text in found if not _OWN.search(text)))


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip(" ^~")), "")


def _rows(package: str, version: str, results: Sequence[tuple[Part, str, str]]) -> Iterator[str]:
    """Parts of which the same is to be said share one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for part, verdict, said in results:
        text = " ".join(said.split()).replace("|", "\\|").replace("<", "&lt;")
        text = part.note or (text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")
        groups.setdefault((verdict, text), []).append(part.name)
    for (verdict, text), names in groups.items():
        yield f"| {package} | {version} | {'; '.join(dict.fromkeys(names))} | {verdict} | {text} |"


def main(names: Sequence[str]) -> int:
    print("| package | version | part | verdict | what is said |\n|---|---|---|---|---|")
    wrong = []
    for package, parts in itertools.groupby(sorted(_PARTS, key=lambda part: part.package), lambda part: part.package):
        if names and not any(name in package for name in names):
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        results = []
        for part in parts:
            with tempfile.TemporaryDirectory(prefix="mindx-packages-", ignore_cleanup_errors=True) as folder:
                verdict, said = _judge(part, Path(folder))
            results.append((part, verdict, said))
            want, _, words = part.want.partition(": ")
            if verdict != want or words not in said:
                wrong.append(f"{package} {part.name}: {verdict}: {said}; not {part.want}")
        print(*_rows(package, version, results), sep="\n", flush=True)
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
