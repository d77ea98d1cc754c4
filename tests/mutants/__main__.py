"""Changes one line of the engine at a time, in a copy, and runs the tests of its room: do they notice?

    python -m tests.mutants                  all of list.jsonl; a table by room, and those that no test noticed
    python -m tests.mutants persist start    these rooms
    python -m tests.mutants --choose 9       writes list.jsonl again: 9 a room, by the seed

Run it before and after tests are taken away. A mutant whose line is no longer in the package is skipped and counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("list.jsonl")
ROOMS = (
    *("agent", "agreement", "alarm", "capture", "cluster", "convert", "core", "data", "guard", "memory", "persist"),
    *("platforms", "prove", "rejoin", "start", "train"),
)
_FLIPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_SAME = ("None", "self", '""')
"""Returned in place of these, None mostly makes no difference."""
_MOST_S = 600
"""For the tests of one mutant. It may hang, which is noticed as well as a failure is."""


@dataclass(frozen=True, order=True)
class Mutant:
    """One line of a file. `nth` counts the lines of this text in the file, from 0."""

    file: str
    nth: int
    old: str
    new: str

    @property
    def room(self) -> str:
        return Path(self.file).parts[1]

    def apply(self, root: Path) -> bool:
        """Change the file below `root`; False if it has no such line any more."""
        path = root / self.file
        lines = path.read_text().splitlines() if path.is_file() else []
        at = [i for i, line in enumerate(lines) if line.strip() == self.old.strip()]
        if self.nth >= len(at):
            return False
        line = lines[at[self.nth]]
        lines[at[self.nth]] = line[: len(line) - len(line.lstrip())] + self.new.strip()
        path.write_text("\n".join(lines) + "\n")
        return True


def sites(file: Path) -> Iterator[Mutant]:
    """All changes of a file that this module knows."""
    text = file.read_text()
    lines = text.splitlines()

    def changed(at: ast.expr | ast.stmt, new: str) -> Iterator[Mutant]:
        if at.lineno == at.end_lineno:
            line = lines[at.lineno - 1]
            assert line.isascii(), line  # columns are counted in bytes
            whole = line[: at.col_offset] + new + line[at.end_col_offset :]
            nth = sum(other.strip() == line.strip() for other in lines[: at.lineno - 1])
            yield Mutant(str(file.relative_to(ROOT)), nth, line.strip(), whole.strip())

    def words(node: ast.expr) -> str:
        return ast.get_source_segment(text, node) or ""

    for node in ast.walk(ast.parse(text)):
        if not all(line.isascii() for line in lines[getattr(node, "lineno", 1) - 1 : getattr(node, "end_lineno", 1)]):
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            _, new = _FLIPPED[type(node.ops[0])]
            yield from changed(node, f"{words(node.left)} {new} {words(node.comparators[0])}")
        elif isinstance(node, ast.BoolOp):
            other = " or " if isinstance(node.op, ast.And) else " and "
            yield from changed(node, "(" + other.join(map(words, node.values)) + ")")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _is_number(node.right):
            yield from changed(node.right, str(ast.literal_eval(node.right) + 1))
        elif isinstance(node, ast.Return) and node.value is not None and words(node.value) not in _SAME:
            value = words(node.value)
            yield from changed(
                node, f"return {not ast.literal_eval(value)}" if value in ("True", "False") else "return None"
            )
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if not words(node.value.func).startswith(("_log", "log", "logger")):
                yield from changed(node, "pass")
        elif isinstance(node, ast.If) and words(node.test) != "TYPE_CHECKING":
            yield from changed(node.test, f"not ({words(node.test)})")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def choose(each: int, seed: int) -> None:
    chosen = []
    for room in ROOMS:
        every = [m for file in sorted((ROOT / "mindx_elastic" / room).rglob("*.py")) for m in sites(file)]
        chosen += sorted(random.Random(f"{seed} {room}").sample(every, each))
    LIST.write_text("".join(json.dumps(asdict(m)) + "\n" for m in chosen))


def copy_project(folder: Path) -> Path:
    """All of its files, in `folder`."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def noticed_by(room: str, mutant: Mutant | None) -> str:
    """The test of the room that fails, "" if none does, "gone" if there is no such line. None: nothing is changed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_project(Path(folder))
        if mutant is not None and not mutant.apply(copy):
            return "gone"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "--timeout=120"]
        process = subprocess.Popen(
            [*command, *map(str, _near(copy, room, mutant))],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "CI": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=_MOST_S)[0]
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            _end(process)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if process.returncode == 0:
        return ""
    return failed[0].partition(" - ")[0] if failed else f"exit code {process.returncode}"


def _near(root: Path, room: str, mutant: Mutant | None) -> list[Path]:
    """The test files of the room, and those of others that import the module: in front what mirrors it, then these."""
    tests = sorted((root / "tests" / room).glob("test_*.py"))
    if mutant is None:
        return tests
    file = Path(mutant.file)
    module = ".".join(file.with_suffix("").parts)
    others = [path for path in sorted((root / "tests").glob("*/test_*.py")) if path.parent.name not in (room, "system")]
    others = [path for path in others if re.search(rf"from {re.escape(module)} import", path.read_text())]
    return sorted([*tests, *others], key=lambda path: (path.stem != f"test_{file.stem}", path.parent.name == room))


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="all, if none is named")
    parser.add_argument("--choose", type=int, metavar="N", help="write the list: N mutants a room")
    parser.add_argument("--seed", type=int, default=37)
    given = parser.parse_args()
    if given.choose:
        choose(given.choose, given.seed)
        return 0
    mutants = [Mutant(**json.loads(line)) for line in LIST.read_text().splitlines()]
    counts: dict[str, Counter[str]] = {}
    for room in given.rooms or ROOMS:
        if by := noticed_by(room, None):
            print(f"{room}: {by} fails without any change")
            return 1
        counts[room] = Counter()
        for mutant in mutants:
            if mutant.room == room:
                by = noticed_by(room, mutant)
                outcome = {"": "not noticed", "gone": "gone"}.get(by, "noticed")
                counts[room][outcome] += 1
                print(f"{outcome:12} {mutant.file}: {mutant.old}  ->  {mutant.new}  {by}", flush=True)
    for room, count in counts.items():
        print(f"{room:10}", *(f"{name} {count[name]:3}" for name in ("noticed", "not noticed", "gone")), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
