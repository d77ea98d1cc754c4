"""The shape of the package: which stage may import which, what an import costs and does, what no module may contain."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

from tests.watchdog import finish

ROOT = Path(__file__).parents[1]
PACKAGE = "mindx_elastic"
MAX_LINES = 680  # about 600

STAGES = ["alarm", "agreement", "capture", "persist", "memory", "start"]
"""In the order of the path: a stage imports only stages to its left."""
FOUNDATION = {"_version", "config", "core", "errors"}
"""What everything may import, and what imports nothing but its own kind."""
JOINERS = {
    *(
        "agent",
        "archive",
        "cli",
        "cluster",
        "convert",
        "doctor",
        "drill",
        "guard",
        "integrations",
        "mirror",
        "platforms",
    ),
    *("prove", "rejoin", "report", "train"),
}
"""May import any stage. So may the modules at the top of the package. No stage imports one of them."""
PURE = [
    *(
        "agent/hang.py",
        "agent/places.py",
        "agent/restarts.py",
        "agent/slow.py",
        "agreement/stop_step.py",
        "cluster/messages.py",
        "cluster/table.py",
        "rejoin/protocol.py",
        "mirror/partners.py",
        "persist/retention.py",
    ),
    *(
        "core/layout.py",
        "core/moment.py",
        "core/pace.py",
        "core/position.py",
        "core/rank_lists.py",
        "core/strategy.py",
        "core/values.py",
    ),
    *("start/assumptions.py", "start/candidate.py", "start/facts.py", "start/planner.py"),
    *("doctor/saving.py", "drill/faults.py", "prove/causes.py", "prove/compare.py"),
]
"""Deciders: no torch, threads, clock or file system, so that they are tested in milliseconds and by properties."""
IMPURE_MODULES = {
    *("asyncio", "datetime", "fcntl", "glob", "io", "mmap", "multiprocessing", "os", "random", "safetensors", "shutil"),
    *("signal", "socket", "subprocess", "tempfile", "threading", "time", "torch"),
}
OF_LIBRARIES = {f"{PACKAGE}.integrations.{name}": name for name in ("accelerate", "lightning", "transformers")}
"""Modules that cannot be imported without a library that is not a requirement."""
CODE_LOADERS = {"cloudpickle", "cPickle", "dill", "joblib", "marshal", "pickle", "runpy", "shelve"}
CODE_RUNNERS = {"compile", "eval", "exec", "execfile"}
SCRIPT_RUNNER = f"{PACKAGE}.core.script"
"""The one module that may call ``exec``: on the user's own script, which ``mindx-elastic run`` or ``prove`` names."""
FORBIDDEN_CALLS = {"numpy.load", "torch.load", "torch.serialization.load", "yaml.load", "yaml.unsafe_load", "os.system"}


def part_of(name: str) -> str:
    """The stage, joiner or top module that a dotted name belongs to; ``""`` for the package itself."""
    return name.partition(".")[2].partition(".")[0]


@dataclass(frozen=True)
class Module:
    path: Path
    """The source file."""
    name: str
    """Dotted name, for example ``mindx_elastic.alarm.signals``."""
    source: str = field(repr=False)

    @property
    def part(self) -> str:
        return part_of(self.name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=str(self.path), feature_version=(3, 10))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree: each check goes through them."""
        return [*ast.walk(self.tree)]

    @cached_property
    def nodes_at_run_time(self) -> list[ast.AST]:
        return [*nodes_at_run_time(self.tree)]

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def find_modules(root: Path = ROOT) -> list[Module]:
    modules = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if path.name.endswith("_pb2.py"):  # written by protoc
            continue
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(path, name, path.read_text(encoding="utf-8")))
    return modules


MODULES = find_modules()
NAMES = {module.name for module in MODULES}


def offenders(find: Callable[[Module], Collection[str]]) -> dict[str, Collection[str]]:
    """What `find` finds, by file; files in which it finds nothing are left out."""
    return {str(module): found for module in MODULES if (found := find(module))}


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that is not under ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for orelse in child.orelse:
                yield orelse
                yield from nodes_at_run_time(orelse)
            continue
        yield child
        yield from nodes_at_run_time(child)


def imported_names(module: Module, *, known: set[str] = NAMES, at_run_time: bool = True) -> set[str]:
    """Dotted names that the module imports, anywhere in it, relative ones made absolute; modules where they are."""
    found: set[str] = set()
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in module.nodes_at_run_time if at_run_time else module.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in known else base)
    return found


def forbidden_arrows(module: Module, *, known: set[str] = NAMES) -> list[str]:
    """Imports of the module that point against the path."""
    allowed = set(FOUNDATION)
    if module.part in STAGES:
        allowed |= set(STAGES[: STAGES.index(module.part) + 1])
        allowed |= {"data"} if module.part == "start" else set()
    elif module.part == "data":
        allowed |= {"alarm", "data"}
    elif module.part not in FOUNDATION:
        return []
    ours = {name for name in imported_names(module, known=known) if name.split(".")[0] == PACKAGE}
    return sorted(name for name in ours if part_of(name) not in allowed)


def test_a_stage_imports_only_what_is_to_its_left() -> None:
    assert not offenders(forbidden_arrows)


PLATFORM_FREE = {*STAGES, "agent", "config", "guard"}
FOREIGN_WORDS = re.compile(r"\b(?i:mindspore|modelarts|mindio|hccl|ascend\b)|(?i:tft|rank_table)|\bMS_[A-Z]")
KNOWS_THE_VARIABLES = "mindx_elastic.config"
"""Every environment variable that is documented is read there, those of platforms too."""


def test_the_engine_does_not_know_the_platforms() -> None:
    """Their names and formats are in ``platforms/``, and what it hands over has names of its own."""
    lines = {
        f"{module}:{number}": line.strip()
        for module in MODULES
        if module.part in PLATFORM_FREE and module.name != KNOWS_THE_VARIABLES
        for number, line in enumerate(module.source.splitlines(), 1)
    }
    assert not {place: line for place, line in lines.items() if FOREIGN_WORDS.search(line)}


def test_every_folder_has_its_place_on_the_path() -> None:
    folders = {path.name for path in (ROOT / PACKAGE).iterdir() if (path / "__init__.py").exists()}
    assert folders <= {*STAGES, *JOINERS, "core", "data"}, "say in this test what a new folder may import"


def import_circles(modules: Sequence[Module]) -> set[frozenset[str]]:
    """Groups of modules that import each other, at once or by way of others. ``if TYPE_CHECKING:`` and imports inside
    functions count too: they hide a circle and do not remove it."""
    names = {module.name for module in modules}
    imports = {m.name: imported_names(m, known=names, at_run_time=False) & names - {m.name} for m in modules}
    reached: dict[str, set[str]] = {}
    for name in names:
        todo = reached[name] = set(imports[name])
        while todo:
            todo = set().union(*(imports[other] for other in todo)) - reached[name]
            reached[name] |= todo
    return {frozenset(n for n in reached[name] if name in reached[n]) for name in names if name in reached[name]}


def test_no_modules_import_each_other() -> None:
    sources = {"a": "from mindx_elastic.x import b", "b": "if TYPE_CHECKING:\n    from mindx_elastic.x.a import A"}
    pair = [Module(ROOT / f"{name}.py", f"{PACKAGE}.x.{name}", source) for name, source in sources.items()]
    assert import_circles(pair) == {frozenset({f"{PACKAGE}.x.a", f"{PACKAGE}.x.b"})}
    assert not import_circles(MODULES)


@pytest.mark.parametrize(
    ("room", "foreign"), [("guard", ("prove", "drill", "cluster")), ("guard.checks", ("guard.loops",))]
)
def test_a_room_does_not_import_what_is_built_around_it(room: str, foreign: tuple[str, ...]) -> None:
    """What looks at the guard's steps, breaks a rank or keeps a cluster knows the guard by a port; what the checks and
    the loops both read of a program's source is with the checks."""
    inside = [module for module in MODULES if f"{module.name}.".startswith(f"{PACKAGE}.{room}.")]
    outside = tuple(f"{PACKAGE}.{name}" for name in foreign)
    assert inside
    imports = {str(module): imported_names(module, at_run_time=False) for module in inside}
    assert not {
        name: wrong for name, found in imports.items() if (wrong := [n for n in found if n.startswith(outside)])
    }


def private_imports(module: Module, *, known: set[str] = NAMES) -> list[str]:
    """Names with a leading underscore that the module imports from another one of the package, by line."""
    found = []
    for node in module.nodes:
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if not node.level and base.split(".")[0] != PACKAGE:
            continue
        names = [alias.name for alias in node.names if f"{base}.{alias.name}" not in known]
        own = [name for name in names if name.startswith("_") and not name.endswith("__")]
        found += [f"line {node.lineno}: {name}" for name in own]
    return found


def test_what_a_module_shares_has_a_public_name() -> None:
    assert not offenders(private_imports)


def test_pure_deciders_touch_nothing() -> None:
    pure = [module for module in MODULES if module.path in {ROOT / PACKAGE / name for name in PURE}]
    assert len(pure) == len(PURE), "PURE names a file that does not exist"
    used = {str(module): {name.split(".")[0] for name in imported_names(module)} for module in pure}
    assert not {name: imported & IMPURE_MODULES for name, imported in used.items() if imported & IMPURE_MODULES}


def aliases(module: Module) -> dict[str, str]:
    """Local name -> full name, of everything imported: ``np`` -> ``numpy``, ``load`` -> ``torch.load``."""
    names: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def risky_code(module: Module) -> list[str]:
    """Places where the module could run code out of a file, a message or a string."""
    known_as = aliases(module)
    found = [name for name in imported_names(module) if name.split(".")[0] in CODE_LOADERS]
    for node in module.nodes:
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(f"line {node.value.lineno}: allow_pickle")
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        first, dot, rest = called.partition(".")
        full = known_as.get(first, first) + dot + rest
        if module.name == SCRIPT_RUNNER and full == "exec":
            continue
        if full in CODE_RUNNERS or full in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: {called}")
        found += [f"line {node.lineno}: shell=True" for k in node.keywords if k.arg == "shell"]
    return sorted(found)


def test_nothing_runs_code_from_data() -> None:
    assert not offenders(risky_code)


def test_files_are_short() -> None:
    lengths = {str(module): module.source.count("\n") for module in MODULES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def broken_docstrings(module: Module) -> list[str]:
    """First lines of docstrings whose summary runs over into the next paragraph, or has quotes that a re-wrap left."""
    texts = [n.value.value for n in module.nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    found = []
    for lines in [text.split("\n") for text in texts if isinstance(text, str)]:
        broken = len(lines) > 2 and not lines[1].strip() and lines[0].rstrip()[-1:] not in (*".:!?`)",)
        if broken or any(a.endswith(' "') and b.strip()[:1] == '"' for a, b in itertools.pairwise(lines)):
            found.append(lines[0])
    return found


def test_the_first_sentence_of_a_docstring_is_not_broken() -> None:
    assert not offenders(broken_docstrings)


def defined_names(tree: ast.Module) -> set[str]:
    """Public classes and functions that the module itself defines."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def wrong_all(module: Module) -> list[str]:
    """What is wrong with the module's ``__all__``."""
    if module.name in OF_LIBRARIES and importlib.util.find_spec(OF_LIBRARIES[module.name]) is None:
        return []
    imported = importlib.import_module(module.name)
    declared: list[str] = list(getattr(imported, "__all__", ()))
    wrong = [f"{name}: twice" for name in sorted(set(declared)) if declared.count(name) > 1]
    wrong += [f"{name}: does not exist" for name in declared if not hasattr(imported, name)]
    if module.name.rpartition(".")[2] != "__main__":
        wrong += [f"{name}: public, and not in __all__" for name in sorted(defined_names(module.tree) - set(declared))]
    return wrong


def test_all_names_are_the_real_public_names() -> None:
    assert not offenders(wrong_all)


# Runs in a fresh interpreter. torch is imported first, so that only what this package adds is seen.
PROBE = """
import atexit, gc, json, logging, os, signal, sys, threading, warnings
import numpy, torch

def handlers():
    return {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}

touched = []
def listen(event, arguments):
    if event == "open":
        name, mode, flags = arguments
        if (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND):
            touched.append(f"open {name}")
    elif (event, arguments) == ("ctypes.dlopen", (None,)):  # the C library that is loaded already
        pass
    elif event.split(".")[0] in ("socket", "subprocess", "shutil", "tempfile", "ctypes", "fcntl") or event in (
        "os.mkdir", "os.rename", "os.remove", "os.fork", "os.posix_spawn", "os.system", "os.putenv", "os.unsetenv",
        "os.kill", "os.chdir", "signal.pthread_kill",
    ):
        touched.append(f"{event} {arguments}")

def facts():
    root = logging.getLogger()
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
        "handlers": handlers(),
        "wakeup": wakeup,
        "atexit": atexit._ncallbacks(),
        "environ": dict(os.environ),
        "hooks": [repr(hook) for hook in (sys.excepthook, threading.excepthook, sys.unraisablehook)],
        "logging": [root.level, len(root.handlers), logging.lastResort.level],
        "warnings": len(warnings.filters),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "torch": [torch.initial_seed(), torch.get_num_threads(), torch.is_grad_enabled()],
        "cuda": torch.cuda.is_initialized(),
        "numpy": numpy.random.get_state()[1].tolist()[:4],
    }

before, modules = facts(), set(sys.modules)
sys.addaudithook(listen)
import mindx_elastic
seen = list(touched)
after = facts()
package_logger = logging.getLogger("mindx_elastic")
print(json.dumps({
    "changed": {key: [before[key], after[key]] for key in before if before[key] != after[key]},
    "touched": [entry for entry in seen if ".pyc" not in entry],
    "modules": sorted(set(sys.modules) - modules),
    "log_handlers": [repr(handler) for handler in package_logger.handlers],
    "cwd": os.listdir("."),
}))
"""

HEAVY = [
    *(
        "accelerate",
        "google.protobuf",
        "lightning",
        "matplotlib",
        "pandas",
        "pytest",
        "pytorch_lightning",
        "rich",
        "scipy",
    ),
    *("sklearn", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.run", "torch.onnx", "torchvision"),
    *("torch.utils.tensorboard", "tqdm", "transformers", "typer", "jinja2"),
]
"""What only one command or one integration needs is imported there, when it runs."""


@pytest.fixture(scope="module")
def import_facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What one ``import mindx_elastic`` changed in a fresh interpreter with an empty working directory."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "error", "-c", PROBE]
    place = tmp_path_factory.mktemp("empty")
    done = finish(command, cwd=place, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "importing the package prints something"
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def test_nothing_happens_at_import(import_facts: dict[str, object]) -> None:
    wrong = {key: import_facts[key] for key in ("changed", "touched", "log_handlers", "cwd") if import_facts[key]}
    assert not wrong


def test_import_pulls_in_nothing_heavy(import_facts: dict[str, object]) -> None:
    modules = import_facts["modules"]
    assert isinstance(modules, list)
    assert [name for name in HEAVY if name in modules] == []


def test_the_start_of_a_job_imports_little_besides_torch() -> None:
    """An agent is as soon at its workers as torchrun. What it needs at their end is imported as soon as they train: at
    a death the disk that it lies on may hang, or have another version."""
    code = (
        "import sys, threading, mindx_elastic.cli.main, mindx_elastic.agent.launcher\n"
        "from mindx_elastic.agent.supervisor import Supervisor\n"
        "from mindx_elastic.core.status_page import Status\n"
        "agent = object.__new__(Supervisor)\n"
        "agent.arenas, agent.directories = set(), set()\n"
        "agent._note_arenas({0: Status(arena='')})\n"
        "print(*sys.modules)\n"
        "agent._note_arenas({0: Status(arena='/dev/shm/job')})\n"
        "for thread in set(threading.enumerate()) - {threading.main_thread()}: thread.join()\n"
        "print('mindx_elastic.agent.holder' in sys.modules, 'rich.table' in sys.modules)"
    )
    modules, at_the_end = finish([sys.executable, "-c", code]).stdout.splitlines()
    assert at_the_end == "True True"
    wanted = {"torch.distributed.run", "torch"}
    ours = [f"{PACKAGE}.{room}" for room in ("capture", "guard", "persist.format", "start.inventory", "memory.arena")]
    late = {*HEAVY, *ours, "torch.distributed.tensor"}.intersection(modules.split()) - wanted
    assert late == set() and wanted <= {*modules.split()}


def test_the_version_is_read_without_torch() -> None:
    code = (
        "import runpy, sys; v = runpy.run_path(sys.argv[1])['__version__']; assert 'torch' not in sys.modules; print(v)"
    )
    command = [sys.executable, "-c", code, str(ROOT / PACKAGE / "_version.py")]
    done = finish(command)
    assert done.returncode == 0, done.stderr
    version = importlib.import_module(f"{PACKAGE}._version").__version__
    assert done.stdout.strip() == version
