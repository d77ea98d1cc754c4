"""The files that version 0.1 wrote are used as 0.1 itself would use them; see ``tests/data/v0_1/README.md``."""

from __future__ import annotations

import gzip
import json
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.cli.main import main
from tests.harness import Job, start_job

pytestmark = pytest.mark.slow
FILES = Path(__file__).parent / "data" / "v0_1"
JOB = str(FILES / "job.py")
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))
"""What 0.1 said of its own files: "one rank" and "two ranks" after a resume, and "commands"."""


def copy_case(case: str, target: Path) -> Path:
    """A copy that belongs to the user of the test and that only this user may write to."""
    for source in sorted((FILES / case).rglob("*")):
        if source.is_file():
            path = target / source.relative_to(FILES / case)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = source.read_bytes()
            if path.suffix == ".gz":
                path, content = path.with_suffix(""), gzip.decompress(content)
            path.write_bytes(content)
            path.chmod(0o644)
    return target


_OTHERWISE = ("proof", "exact", "bytes", "total_bytes")


def without_proof(said: Any) -> Any:
    """Version 0.1 said that a resume is exact where nothing is known against it: now it is not proved yet. And a plan
    counted bytes of tensors, where it now has the sizes of the files."""
    if isinstance(said, list):
        return [without_proof(each) for each in said]
    if not isinstance(said, dict):
        return said
    known = {key: without_proof(value) for key, value in said.items() if key not in _OTHERWISE}
    return {**known, "exact": False if said["exact"] is False else None} if "exact" in said else known


@dataclass
class Call:
    """One process, or two ranks, that say what they find in copies of some cases."""

    action: str
    names: list[str]
    base: Path
    ranks: int = 1

    def start(self) -> AbstractContextManager[Job]:
        """Run ``job.py`` with the present code, on a machine whose memory and fault reports are empty."""
        memory = self.base / "memory"
        memory.mkdir()
        nothing = {name: str(self.base / "nothing") for name in ("MINDX_FAULT_DIR", "MINDX_RESET_DIR")}
        env = {"MS_ENABLE_TFT": "{TTP:1}", "MINDX_ARENA_DIR": str(memory), **nothing}
        return start_job(JOB, self.action, *self.words(), ranks=self.ranks, env=env)

    def words(self) -> list[str]:
        cases = [name.partition(" ")[0] for name in self.names]  # "fsdp on 1 rank"
        folders = [copy_case(case, self.base / str(number)) for number, case in enumerate(cases)]
        inside = "ckpt" if self.action == "load" else ""
        return [f"{case}={folder / inside}" for case, folder in zip(cases, folders, strict=True)]

    def answers(self, job: Job) -> dict[str, Any]:
        """By name; of a resume a list, rank by rank."""
        found = [json.loads(match[1]) for match in job.expect(0).matches(r"^FACTS (.*)$")]
        if self.action == "commands":
            return {facts.pop("case"): facts for facts in found}
        found.sort(key=lambda facts: (facts["number"], facts["rank"]))
        by_name: dict[str, Any] = {}
        for facts in found:
            by_name.setdefault(self.names[facts.pop("number")], []).append(facts)
        return by_name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the present code says, in the form of EXPECTED. The jobs run beside each other: they are mostly imports."""
    calls = {
        "one rank": Call("load", list(EXPECTED["one rank"]), tmp_path_factory.mktemp("one")),
        "two ranks": Call("load", list(EXPECTED["two ranks"]), tmp_path_factory.mktemp("two"), ranks=2),
        "commands": Call("commands", list(EXPECTED["commands"]), tmp_path_factory.mktemp("commands")),
    }
    with ExitStack() as stack:
        jobs = {part: stack.enter_context(call.start()) for part, call in calls.items()}
        return {part: call.answers(jobs[part]) for part, call in calls.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize(("world", "name"), [(w, n) for w in ("one rank", "two ranks") for n in EXPECTED[w]])
def test_a_start_goes_on_as_0_1_would(found: dict[str, dict[str, Any]], world: str, name: str) -> None:
    """The same file, position, tensors, random numbers and samples on each rank, and the same ``resume_plan.json``."""
    assert without_proof(found[world][name]) == without_proof(EXPECTED[world][name])


@pytest.mark.parametrize("case", EXPECTED["commands"])
def test_the_commands_say_what_0_1_said(found: dict[str, dict[str, Any]], case: str) -> None:
    """``plan``, ``inspect``, ``verify``, ``status`` and ``convert``; strategy and group info files."""
    assert without_proof(found["commands"][case]) == without_proof(EXPECTED["commands"][case])


def test_no_file_of_the_set_is_left_out() -> None:
    """Each kind of file that a job of 0.1 leaves behind is in the set, whatever .gitignore says."""
    names = " ".join(path.relative_to(FILES).as_posix() for path in FILES.rglob("*") if path.is_file())
    kinds = ["_breakpoint.safetensors", "_train.safetensors", "_eval.safetensors", "ttp_rank_1", "/memory-", "net-1_2."]
    kinds += ["quarantine/", ".reason.txt", "boundaries.mindx.gz", "ckpt/events.jsonl", "run/events.jsonl"]
    kinds += ["strategy.proto", "resume_plan.json", "group_info.pb", "restore.env"]
    assert [kind for kind in kinds if kind not in names] == []


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_the_exports_for_a_start_script_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """``mindx-elastic plan --emit-env`` writes what it wrote in 0.1."""
    for name in ("MINDX_FAULT_DIR", "MINDX_RESET_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    folder, exports = copy_case(case, tmp_path / case), tmp_path / "exports.env"
    monkeypatch.setattr("sys.argv", ["mindx-elastic", "plan", str(folder / "ckpt"), "--emit-env", str(exports)])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert not leaving.value.code
    assert exports.read_text(encoding="utf-8") == (folder / "restore.env").read_text(encoding="utf-8")
