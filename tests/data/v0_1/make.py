"""Makes the files in this folder again, with version 0.1 of the package: real jobs, stopped and killed.

    git worktree add /tmp/v01 58df474
    PYTHONPATH=/tmp/v01 python tests/data/v0_1/make.py

The jobs run in /tmp/job, so that no path of the machine gets into a file. Takes about two minutes.
"""

from __future__ import annotations

import getpass
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindx_elastic

HERE = Path(__file__).resolve().parent
COMMIT = "58df474"
JOB = Path("/tmp/job")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0")
Facts = dict[str, Any]
TFT = {"MS_ENABLE_TFT": "{TTP:1}"}
ONE_RANK = {
    "plain": "plain",
    "finished": "finished",
    "model": "model",
    "request_exit": "request_exit",
    "ddp on 1 rank": "ddp",
    "fsdp on 1 rank": "fsdp",
    "memory on 1 rank": "memory",
    "tft on 1 rank": "tft",
}
"""What one process resumes from, one after the other: a name -> the case."""
TWO_RANKS = {name: name for name in ("ddp", "fsdp", "tft", "ring", "memory")}
"""The same for a job of two ranks."""


def run(*words: object, code: int, env: dict[str, str] | None = None) -> str:
    """Run Python with `words`, insist on the exit code, and return its output."""
    command = [sys.executable, *map(str, words)]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINDX_", "MS_", "TORCHELASTIC"))}
    done = subprocess.run(
        command, cwd=JOB, env={**kept, **settings, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        sys.exit(f"{' '.join(command)}\nexit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def train(case: str, *options: str, code: int, launcher: tuple[object, ...] = (), **env: str) -> None:
    run(*launcher, JOB / "job.py", "train", case, JOB / case / "ckpt", *options, code=code, env=env)


def agent(case: str, *options: str) -> None:
    """Train under the agent, without a restart; a killed worker ends it with 137."""
    words = ("-m", "mindx_elastic", "run", "--nproc-per-node", "2", "--max-restarts", "0", "--snapshot-every", "2")
    train(case, *options, code=137, launcher=(*words, "--run-dir", JOB / case / "run"))


def make_plain() -> None:
    """A stop by SIGTERM, whose file is then damaged; the next start goes on from an older one and is stopped too."""
    train("plain", "--save-at", "2", "--stop", "signal:5:0", code=143)
    (newest,) = (JOB / "plain" / "ckpt").glob("*_breakpoint.safetensors")
    newest.write_bytes(newest.read_bytes()[:100])
    train("plain", "--stop", "signal:4:0", code=143)


def make_models() -> None:
    train("finished", code=0)
    train("model", "--stop", "exception:6:0", code=1)
    train("request_exit", "--stop", "flag:3:0", code=75)
    where = JOB / "request_exit" / "ckpt"
    run(JOB / "job.py", "evaluate", "request_exit", where, "--stop", "signal:0:0", code=143)
    (where / "graceful_exit.json").unlink()


def make_two_ranks() -> None:
    group = {"GROUP_INFO_FILE": str(JOB / "ddp" / "group" / "group_info.pb")}
    train("ddp", "--stop", "signal:3:1", code=1, launcher=TWO, **group)
    first = list((JOB / "ddp" / "ckpt").glob("rank_*/*_breakpoint.safetensors"))
    train("ddp", "--stop", "exception:7:1", code=1, launcher=TWO, **group)
    for path in first:  # two files are enough here
        path.unlink()
    train("fsdp", "--stop", "signal:3:0", code=1, launcher=TWO)
    train("tft", "--stop", "exception:3:1", code=1, launcher=TWO, **TFT)
    agent("ring", "--stop", "kill:3:1")
    agent("memory", "--stop", "kill:5:-1")


def trim() -> None:
    """Leave out what is there twice, for size."""
    (JOB / "model" / "ckpt" / "net-1_4.safetensors").unlink()
    (JOB / "ring" / "ckpt" / "rank_0" / "boundaries.mindx").unlink()  # rank 0 has a file


def make_exports() -> None:
    """What ``mindx-elastic plan --emit-env`` writes for a start script."""
    for case in ("ddp", "fsdp"):
        run("-m", "mindx_elastic", "plan", JOB / case / "ckpt", "--emit-env", JOB / case / "restore.env", code=0)


def load(names: dict[str, str], launcher: tuple[str, ...] = ()) -> dict[str, list[Facts]]:
    """What version 0.1 itself resumes to, from copies: a name -> the facts of each rank."""
    places = {name: JOB / "load" / name for name in names}
    for name, place in places.items():
        shutil.copytree(JOB / names[name] / "ckpt", place)
    cases = [f"{names[name]}={place}" for name, place in places.items()]
    found: dict[str, list[Facts]] = {name: [] for name in names}
    for facts in facts_in(run(*launcher, JOB / "job.py", "load", *cases, code=0, env=TFT)):
        found[list(names)[facts.pop("number")]].append(facts)
    shutil.rmtree(JOB / "load")
    return {name: sorted(facts, key=lambda one: int(one["rank"])) for name, facts in found.items()}


def ask_commands(cases: list[str]) -> dict[str, Facts]:
    """What version 0.1's commands say of each case."""
    output = run(JOB / "job.py", "commands", *(f"{case}={JOB / case}" for case in cases), code=0)
    return {facts.pop("case"): facts for facts in facts_in(output)}


def facts_in(output: str) -> list[Facts]:
    return [json.loads(line) for line in re.findall(r"^FACTS (.*)$", output, re.MULTILINE)]


def collect(case: str) -> None:
    """Copy a case's files here; the host, the interpreter and the user stay out of them."""
    target = HERE / case
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("logs", "stacks", "*.mindx-tmp")
    shutil.copytree(JOB / case, target, ignore=ignored)
    private = {f'"{socket.gethostname()}"': '"node0"', sys.executable: "python"}
    for path in list(target.rglob("*")):
        if path.suffix in (".json", ".jsonl", ".env"):
            text = path.read_text()
            for word, neutral in private.items():
                text = text.replace(word, neutral)
            path.write_text(text)
        if path.name == "boundaries.mindx":  # half a megabyte, mostly zeros
            packed = gzip.compress(path.read_bytes(), mtime=0)
            path.unlink()
            path.with_name(f"{path.name}.gz").write_bytes(packed)
        elif path.is_file():
            content = path.read_bytes()
            words = [*private, os.path.expanduser("~") + "/", str(HERE), str(Path(mindx_elastic.__file__).parent)]
            words += [f"/{getpass.getuser()}/"]
            found = [word for word in words if word.encode() in content]
            if found:
                sys.exit(f"{path} contains {found}")


def main() -> None:
    source = Path(mindx_elastic.__file__).parents[1]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=True).stdout
    if not commit.startswith(COMMIT):
        sys.exit(f"{source} is commit {commit.strip()}; put version 0.1 (commit {COMMIT}) on PYTHONPATH")
    JOB.mkdir(mode=0o700)
    shutil.copy2(HERE / "job.py", JOB)
    make_plain()
    make_models()
    make_two_ranks()
    make_exports()
    trim()
    cases = sorted({*ONE_RANK.values(), *TWO_RANKS.values()})
    expected = {"one rank": load(ONE_RANK), "two ranks": load(TWO_RANKS, TWO), "commands": ask_commands(cases)}
    for case in cases:
        collect(case)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    shutil.rmtree(JOB)


if __name__ == "__main__":
    main()
