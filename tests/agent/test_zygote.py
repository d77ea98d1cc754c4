"""Workers that are forked: each test starts real processes, and compares them with fresh interpreters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindx_elastic.agent import child
from mindx_elastic.agent.workers import process_state
from mindx_elastic.agent.zygote import Zygote, ZygoteError
from tests.fork_server import clean_environment
from tests.harness import wait_until

ENV = {**clean_environment(), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
READY_S = 120.0


def ready(zygote: Zygote) -> Zygote:
    zygote.start()
    while not zygote.wait(READY_S) and not zygote.problem:
        pass
    return zygote


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    script = tmp_path_factory.mktemp("zygote") / "empty.py"
    script.touch()
    found = ready(Zygote([sys.executable, "-u", str(script)], ENV))
    assert not found.problem
    yield found
    found.close()


def write(folder: Path, code: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return path


def run(
    zygote: Zygote, folder: Path, *script: str | Path, env: dict[str, str] | None = None, hook: str = ""
) -> tuple[int, str]:
    """Exit code and output of a forked worker."""
    command = [sys.executable, "-u", *map(str, script)]
    output = folder / "output"
    output.unlink(missing_ok=True)
    worker = zygote.fork({**ENV, **(env or {})}, command=command, stdout=str(output), stderr=str(output), hook=hook)
    return worker.wait(60), output.read_text()


def run_fresh(*script: str | Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    shim = [sys.executable, "-I", "-S", str(child.__file__), str(os.getpid())]
    done = subprocess.run(
        [*shim, sys.executable, "-u", *map(str, script)],
        env={**ENV, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


# --- as a fresh interpreter ---

SELF = """
    import ctypes, os, signal, sys, threading
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)  # PR_GET_PDEATHSIG
    def mask(name):
        return [l.split()[1] for l in open('/proc/self/status') if l.startswith(name)]
    print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable, sys.warnoptions, sys._xoptions)
    print(os.getcwd(), os.getppid(), os.getsid(0) == os.getpid() == os.getpgid(0), death.value)
    print(sorted(i for i in os.environ.items() if i[0] != 'TORCHINDUCTOR_CACHE_DIR'))  # torch._dynamo sets it
    print(mask(('SigI', 'SigB', 'SigC')), mask('Threads'), os.nice(0), sorted(os.sched_getaffinity(0)))
    print([signal.getsignal(n) for n in range(1, 32)])
    print(__name__, __file__, sorted(k for k in globals() if k[:2] == '__'), __spec__ and __spec__.name, __package__)
    print(sys.modules['__main__'].__dict__ is globals(), type(__loader__), __builtins__, __cached__)
    for s in (sys.stdin, sys.stdout, sys.stderr):
        print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines, s.seekable())
        print(type(s.buffer), s.buffer.mode, s.buffer.name, s.isatty(), s.closed)
    print(sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__)
    print(threading.current_thread() is threading.main_thread(), threading.main_thread().ident == threading.get_ident())
    print(hash('a'))
    print(sorted(os.listdir('/proc/self/fd'))[:3], open('/proc/self/comm').read())
    import torch
    print(torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.backends.cudnn.benchmark)
"""


def test_it_is_as_a_fresh_interpreter(zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, SELF)
    monkeypatch.chdir(tmp_path)
    env = {"RANK": "3", "MINDX_ATTEMPT": "ü"}
    words = ["train.py", "--x", "1 2", "", "-m"]
    fresh = run_fresh(*words, env=env)
    assert fresh[0] == 0
    forked = run(zygote, tmp_path, *words, env=env)
    assert forked[0] == 0
    for mine, theirs in zip(forked[1].splitlines(), fresh[1].splitlines(), strict=True):
        assert _without_seekable(mine) == _without_seekable(theirs)


def _without_seekable(line: str) -> str:
    """A pipe here, a file there. And without what torch 2.6 adds to the search path at its import."""
    line = re.sub(r", '[^']*(/setuptools/_vendor|/tmp\w{8})'", "", line)
    return line.rpartition(" ")[0] if line.startswith("<std") else line


ENDINGS = {
    "text": ("import sys; sys.exit('over')", 1),
    "exception": ("class E(Exception): pass\nraise E('over')", 1),
    "signal": ("import os; os.kill(os.getpid(), 15)", -15),
    "interrupt": ("raise KeyboardInterrupt", -2),
    "atexit": ("import atexit; atexit.register(print, 'at the end'); print('first')", 0),
    "thread": ("import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()", 0),
    "hook": ("import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1 / 0", 1),
    "unflushed": ("print('x', end='')", 0),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_it_ends_as_a_fresh_interpreter(zygote: Zygote, tmp_path: Path, name: str) -> None:
    code, expected = ENDINGS[name]
    script = write(tmp_path, code)
    fresh, forked = run_fresh(script), run(zygote, tmp_path, script)
    assert fresh[0] == forked[0] == expected, forked[1]
    lines = [line for line in forked[1].splitlines() if line != '  File "<string>", line 1, in <module>']
    assert lines == fresh[1].splitlines()


def test_each_draws_other_numbers(zygote: Zygote, tmp_path: Path) -> None:
    code = """
        import random, tempfile, multiprocessing, numpy, torch
        for number in (random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()):
            print(number)
        print(bytes(multiprocessing.current_process().authkey).hex(), next(tempfile._get_candidate_names()))
    """
    script = write(tmp_path, code)
    first, second = (run(zygote, tmp_path, script)[1].split() for _ in range(2))
    assert len(first) == 6 and not set(first) & set(second)


def test_the_programs_own_modules_are_imported_by_each(zygote: Zygote, tmp_path: Path) -> None:
    script = write(tmp_path, "import mine; print(mine.VALUE)")
    for value in (1, 2):
        write(tmp_path, f"VALUE = {value}  #{' ' * value}", "mine.py")
        assert run(zygote, tmp_path, script) == (0, f"{value}\n")


def test_modules_that_are_asked_for_are_there_at_the_fork(tmp_path: Path) -> None:
    write(tmp_path, "import os; PID = os.getpid()", "slow_to_import.py")
    script = write(tmp_path, "import slow_to_import; print(slow_to_import.PID)")
    env = {"PYTHONPATH": str(tmp_path), "MINDX_PRELOAD": " slow_to_import,, json"}
    found = ready(Zygote([sys.executable, "-u", str(script)], {**ENV, **env}))
    first, second = (run(found, tmp_path, script, env=env) for _ in range(2))
    assert first == second and first[0] == 0
    found.close()


# --- a child of the agent ---

AGENT = """
    import os, sys, time
    from mindx_elastic.agent.zygote import Zygote
    held = open(os.devnull)
    os.set_inheritable(held.fileno(), True)
    zygote = Zygote([sys.executable, "-u", sys.argv[1]], dict(os.environ))
    zygote.start()
    while not zygote.wait(1.0):
        assert not zygote.problem, zygote.problem
    print(zygote.pid, zygote.fork(dict(os.environ)).pid, flush=True)
    time.sleep(3600)
"""
WORKER = """
    import os, signal, time
    signal.signal(15, lambda *_: (print('caught', flush=True), os._exit(0)))
    print('up', flush=True)
    time.sleep(3600)
"""


@pytest.mark.drill
def test_zygote_and_workers_hold_nothing_open_and_end_with_a_killed_agent(tmp_path: Path) -> None:
    script = write(tmp_path, WORKER)
    command = [sys.executable, str(write(tmp_path, AGENT, "agent.py")), str(script)]
    agent = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent, agent.stdout:
        try:
            said = sorted(agent.stdout.readline() for _ in range(2))  # the agent and the worker write to one pipe
            zygote, worker = map(int, said[0].split())
            assert len(os.listdir(f"/proc/{zygote}/fd")) == 4, "its end of the channel, too"
            assert sorted(os.listdir(f"/proc/{worker}/fd")) == ["0", "1", "2"]
        finally:
            agent.kill()
            agent.wait()
        rest = agent.stdout.read()  # which ends when the zygote has not kept the pipe open either
    assert said[1] == "up\n" and rest == "caught\n"
    for pid in (zygote, worker):
        wait_until(lambda pid=pid: process_state(pid) in ("", "Z"), "end of the process")


# --- what cannot be forked ---


def test_what_would_not_be_as_in_a_fresh_interpreter(zygote: Zygote, tmp_path: Path) -> None:
    """A variable that imports may have read, another interpreter, a script that is gone or cannot be read, or has a
    module of the name of one that torch imports."""

    def refused(why: str, *words: object, **variables: str) -> None:
        with pytest.raises(ZygoteError, match=why):
            zygote.fork({**ENV, **variables}, command=[sys.executable, *map(str, words)])

    good, bad = write(tmp_path, "", "good.py"), write(tmp_path, "this is no python\n  at all", "bad.py")
    refused("OMP_NUM_THREADS", "-u", good, OMP_NUM_THREADS="3")
    refused("NEW", "-u", good, NEW="")
    refused("SyntaxError", "-u", bad)
    refused("another one", "-u", tmp_path / "gone.py")
    refused("another one", "-O", good)
    write(tmp_path, "MINE = 1", "sympy.py")
    refused("sympy", "-u", good)


@pytest.mark.parametrize("command", [["sh", "-c", "true"], [sys.executable, "-c", "1"], [sys.executable, "-"], []])
def test_commands_that_no_fork_can_run(command: list[str]) -> None:
    zygote = Zygote(command, ENV)
    zygote.start()
    assert zygote.problem and not zygote.wait() and zygote.pid == 0
    with pytest.raises(ZygoteError):
        zygote.fork(ENV)
    zygote.close()


def test_an_import_after_which_no_fork_is_a_fresh_interpreter(tmp_path: Path) -> None:
    """Whoever counts CUDA's devices has them open, and a fork can use them no more."""
    write(tmp_path, "HELD = open('/dev/full')", "opens.py")
    env = {**ENV, "PYTHONPATH": str(tmp_path), "MINDX_PRELOAD": "opens"}
    found = ready(Zygote([sys.executable, "-u", str(write(tmp_path, ""))], env))
    assert found.problem == "an import has opened /dev/full"
    found.close()


def test_an_import_that_fails_is_said(tmp_path: Path) -> None:
    write(tmp_path, "raise OSError('broken here')", "torch.py")
    found = ready(Zygote([sys.executable, "-u", str(write(tmp_path, ""))], {**ENV, "PYTHONPATH": str(tmp_path)}))
    assert "broken here" in found.problem
    with pytest.raises(ZygoteError, match="broken here"):
        found.fork({**ENV, "PYTHONPATH": str(tmp_path)})
    found.close()
