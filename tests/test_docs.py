"""The pages under docs/ say what the code does: variables and defaults, events, metadata keys, tree nodes, links."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from mindx_elastic import config
from mindx_elastic.agent import options
from mindx_elastic.agent.history import AttemptRecord, Totals
from mindx_elastic.capture.layouts import LayoutRecorder, ParallelSetup
from mindx_elastic.cli import plan as plan_cli
from mindx_elastic.config import (
    AgentInfo,
    FaultPaths,
    KeySettings,
    MemorySettings,
    ProveSettings,
    RankInfo,
    RedundancySettings,
    RejoinSettings,
    SavingSettings,
    Settings,
    SharingSettings,
    ShrinkSettings,
    TftSettings,
)
from mindx_elastic.guard.stop_save import StopPhase
from mindx_elastic.persist import flatten
from mindx_elastic.platforms.plan_files import env_lines, plan_to_json
from mindx_elastic.rejoin.record import RecoveryRecord, as_event
from mindx_elastic.start.facts import Refusal

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "mindx_elastic").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def section(page: str, title: str) -> str:
    """The text under one heading of docs/`page`, up to the next heading of the same or a higher level."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"docs/{page} has no section {title!r}"
    return found[2]


def rows(text: str) -> dict[str, list[str]]:
    """Table rows by the name in backquotes that their first cell begins with."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]
    return {row[0].split("`")[1]: row[1:] for row in cells}


class Recorder(dict[str, str]):
    """An empty environment that notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def get(self, key: str, default: str | None = None) -> str | None:  # type: ignore[override]
        self.asked.add(key)
        return default


def variables_in_source() -> set[str]:
    """Names of variables that any module of the package reads, from `os.environ` or through `config`."""
    pattern = re.compile(r"""environ(?:\.get\(|\[|\.setdefault\()\s*["'](\w+)["'](?!\] = )|getenv\(\s*["'](\w+)["']""")
    return {a or b for path in SOURCES for a, b in pattern.findall(path.read_text(encoding="utf-8"))}


CLUSTER = config.ClusterSettings
"""Their table is on the page about porting."""
SETTINGS = [cls for cls in vars(config).values() if hasattr(cls, "from_env") and cls is not CLUSTER]


def test_every_variable_that_the_package_reads_is_on_the_page() -> None:
    recorder, cluster = Recorder(), Recorder()
    for cls in SETTINGS:
        cls.from_env(recorder)
    CLUSTER.from_env(cluster)
    assert cluster.asked <= set(
        re.findall(r"`([A-Z_]{4,})`", (ROOT / "docs" / "porting.md").read_text(encoding="utf-8"))
    )
    page = section("reference.md", "Read by the package")
    assert set(rows(page)) | (internal_variables() & recorder.asked) == recorder.asked
    for name in variables_in_source() - recorder.asked:
        assert f"`{name}`" in page, f"{name} is read and not on the page"


def internal_variables() -> set[str]:
    """Those that launchers and our processes set; options of the agent are in the table, too."""
    in_table = rows(section("reference.md", "Read by the package"))
    names = re.findall(r"`([A-Z_]{4,})`", section("reference.md", "Set by the launcher or the agent"))
    return set(names) - set(in_table)


def variables_set_by_the_agent() -> set[str]:
    """Names that any module of the agent puts into its own environment, which its workers inherit."""
    pattern = re.compile(r"""environ\[\s*["'](\w+)["']\] = """)
    return {
        name
        for path in (ROOT / "mindx_elastic" / "agent").glob("*.py")
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }


def test_the_variables_that_the_agent_sets_are_on_the_page() -> None:
    page = section("reference.md", "Set by the launcher or the agent")
    assert not [name for name in variables_set_by_the_agent() if f"`{name}`" not in page]


def test_the_options_of_the_agent_are_on_the_page() -> None:
    ours = ArgumentParser(add_help=False)
    options._add_options(ours)
    known = {action.option_strings[0]: action.default for action in ours._actions}
    page = section("agent.md", "Options")
    assert {name.split()[0] for name in rows(page)} == set(known)
    assert f"| `--crash-loop K` | {known['--crash-loop']} |" in page
    assert f"| `--run-dir DIR` | `{known['--run-dir']}` |" in page
    assert f"`--max-restarts` not given | 0 | {options.DEFAULT_MAX_RESTARTS} " in section(
        "agent.md", "Compared with torchrun"
    )


def test_the_defaults_on_the_page_are_those_of_the_code() -> None:
    recorder = Recorder()
    settings, ranks = Settings.from_env(recorder), RankInfo.from_env(recorder)
    memory, copies, faults = MemorySettings(), RedundancySettings(), FaultPaths()
    assert (MemorySettings.from_env(recorder), FaultPaths.from_env(recorder)) == (memory, faults)
    assert (AgentInfo.from_env(recorder), TftSettings.from_env(recorder)) == (None, TftSettings())
    agent, keys = AgentInfo(folder=Path()), KeySettings.from_env(recorder)
    rejoin, shrink = RejoinSettings.from_env(recorder), ShrinkSettings.from_env(recorder)
    defaults: dict[str, object] = {
        "MINDX_GRACE_S": settings.grace_s,
        "MINDX_AGREEMENT_S": settings.agreement_s,
        "MINDX_FLAG_POLL_S": settings.flag_poll_s,
        "MINDX_FINAL_SAVE": int(settings.final_save),
        "MINDX_OVERLAP": int(settings.overlap),
        "MINDX_REHEARSE": settings.rehearse or None,
        "MINDX_REHEARSE_EXIT": int(settings.rehearse_by_exit),
        "MINDX_REHEARSED": settings.rehearsed,
        "MINDX_ZYGOTE": settings.zygote or None,
        "MINDX_PRELOAD": ",".join(settings.preload) or None,
        "MINDX_DIVIDED_SAVES": SavingSettings.from_env(recorder).divide,
        "MINDX_PAGE_CACHE": "always" if SavingSettings.from_env(recorder).page_cache else "never",
        "MINDX_RECOVER": "in-place" if rejoin.in_place else "restart",
        "MINDX_REJOIN": rejoin.generation,
        "MINDX_REJOIN_TIMEOUT_S": rejoin.timeout_s,
        "MINDX_REJOIN_MOST": rejoin.most,
        "MINDX_REJOIN_NCCL": int(rejoin.nccl),
        "MINDX_SPARE": rejoin.pipe,
        "MINDX_JOB_ID": rejoin.job or None,
        "MINDX_FULL_WORLD_SIZE": shrink.full_size,
        "MINDX_PLACES": ",".join(map(str, shrink.places)) or None,
        "MINDX_ODD": settings.odd,
        "MINDX_ARCHIVE": settings.archive or None,
        "MINDX_UNMANAGED": settings.unmanaged,
        "MINDX_LOG_LEVEL": settings.log_level,
        "MS_ENABLE_GRACEFUL_EXIT": settings.graceful_exit,
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "TORCHELASTIC_RESTART_COUNT": ranks.attempt,
        "MINDX_ARENA_DIR": memory.base,
        "MINDX_SNAPSHOT_EVERY": memory.snapshot_every,
        "MINDX_REDUNDANCY": copies.copies,
        "MINDX_JOB_KEY": keys.text or None,
        "MINDX_JOB_KEY_FILE": keys.file,
        "LOCAL_WORLD_SIZE": keys.local_world_size,
        "MINDX_ALLOW_SHARED_DIRECTORY": int(SharingSettings().allow_shared),
        "MINDX_TRUSTED_USERS": SharingSettings().trusted_users or None,
        "GROUP_RANK": copies.node or None,
        "MINDX_FAULT_DIR": faults.fault_dir,
        "MINDX_RESET_DIR": faults.reset_dir,
        "MS_ENABLE_TFT": TftSettings().enabled or None,
        "MINDIO_FOR_MINDSPORE": TftSettings().for_mindspore or None,
        "MINDX_AGENT_DIR": None,
        "MINDX_AGENT_PID": agent.pid,
        "MINDX_RUN_DIR": agent.run_dir,
        "MINDX_ATTEMPT": agent.attempt,
        "MINDX_PROVE": ProveSettings().control,
    }
    assert len(defaults) == sum(len(fields(cls)) for cls in SETTINGS)
    defaults |= dict.fromkeys(("RANK_ID", "RANK_SIZE", "DEVICE_ID"))  # instead of the first three
    defaults |= dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED"))  # of both versions of Open MPI
    defaults |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": None}  # a second choice
    shown = {name: cells[0] for name, cells in rows(section("reference.md", "Read by the package")).items()}
    as_text = {
        name: "not set" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for name, v in defaults.items()
    }
    assert shown == {name: text for name, text in as_text.items() if name not in internal_variables()}


def test_the_variables_of_the_start_script_are_on_the_page() -> None:
    script = (ROOT / "ma_pre_start.sh").read_text(encoding="utf-8")
    header = script.split("\n\n")[0]
    read, exported = header.split("# Reads\n")[1].split("# Exports\n")
    ours = set(rows(section("reference.md", "Read by `ma_pre_start.sh`")))
    assert set(re.findall(r"^#   ([A-Z_]+)", read, re.MULTILINE)) <= ours
    assert all(name in script for name in ours)
    page = section("reference.md", "Set by `ma_pre_start.sh`")
    assert all(f"`{name}`" in page for name in re.findall(r"^#   ([A-Z_]{3,})", exported, re.MULTILINE))


def test_the_variables_of_the_porting_page_are_on_the_page_of_variables() -> None:
    names = re.findall(
        r"`((?:MS|RANK|MINDIO|GROUP)_[A-Z_]+)\b", (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
    )
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert len(set(names)) > 10
    assert not [name for name in names if f"`{name}" not in page]


def emitted_events() -> Iterator[tuple[str, set[str]]]:
    """(event, keyword arguments) of every call of `EventLog.emit` in the package."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: the event's name is not a literal"
                yield str(name.value), {keyword.arg or "**" for keyword in node.keywords}


def test_every_event_and_its_fields_are_on_the_page() -> None:
    table = rows(section("reference.md", "`events.jsonl`"))
    common = {"step", "reason", "duration_s", "nbytes", "outcome"}
    attempt = {field.name for field in fields(AttemptRecord)} - {"attempt", "cause", "step_reached"}
    expanded: dict[str, set[str]] = {
        "attempt_end": attempt | {"pid", "host"},
        "attempt": set(),  # "as above"
        "agent_start": {"pid", "host"},
        "attempt_start": {"pid", "host"},
        "agent_end": {field.name for field in fields(Totals)} | {"directories", "pid", "host"},
        "rejoin": {*as_event(RecoveryRecord(generation=1, outcome=""))} - common,
        "mirror": {"path", "partner"},
    }
    found = list(emitted_events())
    assert {event for event, _ in found} == set(table)
    for event, keywords in found:
        more = expanded[event] if "**" in keywords else set()
        for extra in (keywords | more) - common - {"**"}:
            assert f"`{extra}`" in " ".join(table[event]), f"field {extra} of event {event}"


def test_metadata_keys_and_tree_nodes_are_on_the_page() -> None:
    source = (ROOT / "mindx_elastic" / "persist" / "format.py").read_text(encoding="utf-8")
    keys = set(re.findall(r'metadata\[?"(mindx\.\w+)"|"(mindx\.\w+)":', source))
    assert {a or b for a, b in keys} <= set(rows(section("reference.md", "The checkpoint file")))
    page = section("reference.md", "The tree")
    tags = {*flatten._PLAIN, *flatten._CONTAINERS, "$tensor", "$ndarray", "$blob"}
    assert set(re.findall(r"\$[a-z]+", page)) - {"$"} == tags


def first_cells(page: str) -> set[str]:
    """Everything in backquotes in the first cells of table rows that begin with such a name."""
    rows = [line.split(" | ")[0] for line in page.splitlines() if line[:3] == "| `"]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_keys_of_a_layout_record_are_on_the_page() -> None:
    record = LayoutRecorder({}, ParallelSetup()).record().json
    page = section("reference.md", "The layout record")
    assert first_cells(page) == set(record)
    assert f"| `version` | {record['version']}. " in page


def test_the_keys_of_a_plan_are_on_the_page() -> None:
    page = section("reference.md", "`resume_plan.json`")
    assert first_cells(page) == set(plan_to_json(Refusal((), found_anything=False)))


def test_the_variables_of_a_plan_are_on_both_pages() -> None:
    exported = {line.partition("=")[0].removeprefix("export ") for line in env_lines(Refusal((), found_anything=False))}
    page = section("reference.md", "Written by `mindx-elastic plan --emit-env FILE`")
    assert first_cells(page) == exported
    start_script = section("planning.md", "In a container's start script")
    assert all(f"`{name}`" in start_script for name in exported)


def test_the_options_and_exit_codes_of_plan_are_on_the_page() -> None:
    page = section("planning.md", "`mindx-elastic plan`")
    parameters = set(inspect.signature(plan_cli.plan_command).parameters) - {"path", "as_json", "verify"}
    for option in {f"--{name.replace('_', '-')}" for name in parameters} | {"--json", "--no-verify"}:
        assert f"`{option}" in page, option
    codes = re.search(r"Exit code(.*?)Examples", inspect.getdoc(plan_cli.plan_command) or "", re.DOTALL)
    assert codes
    assert re.findall(r"^(\d)  ", codes[1], re.MULTILINE) == re.findall(r"^\| (\d) \|", page, re.MULTILINE)


@pytest.mark.parametrize("title", ["MindSpore's files and functions", "Who holds the same"])
def test_the_names_of_the_planning_page_can_be_imported(title: str) -> None:
    found = re.search(r"from mindx_elastic\.plan import (?:\(([^)]*)\)|(.*))", section("planning.md", title))
    assert found
    names = re.findall(r"\w+", found[1] or found[2])
    assert names
    assert not [name for name in names if not hasattr(importlib.import_module("mindx_elastic.plan"), name)]


def test_the_states_of_a_stop_are_on_the_page() -> None:
    page = section("architecture.md", "States of a stop")
    assert re.findall(r"^\| ([A-Z]+) \|", page, re.MULTILINE) == [phase.name for phase in StopPhase]


def anchors(page: Path) -> set[str]:
    """The fragments that lead to the headings of a page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings_that_exist() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, fragment in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
            there = page.parent / target if target else page
            if "://" not in target and (not there.exists() or (fragment and fragment not in anchors(there))):
                broken.append((str(page.relative_to(ROOT)), target, fragment))
    assert not broken


def test_files_that_the_architecture_page_names_exist() -> None:
    for line in section("architecture.md", "Stages and folders").splitlines():
        if line.startswith("| `"):
            first, rest = line.strip("| ").split(" | ", 1)
            places = [ROOT / "mindx_elastic" / name for name in re.findall(r"`([\w./]+)`", first)]
            assert all(place.exists() for place in places), first
            if places[0].is_dir():
                missing = [name for name in re.findall(r"`(\w+\.py)`", rest) if not (places[0] / name).exists()]
                assert not missing, (first, missing)


def test_tests_and_builders_that_the_contributing_page_names_exist() -> None:
    named = re.findall(r"`((?:test_\w+|[a-z]+_[a-z_]+))`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    defined = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^ *def (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 10
    assert not [name for name in named if name not in defined]
