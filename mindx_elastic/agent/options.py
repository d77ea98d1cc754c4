"""The command line of ``mindx-elastic run``: torchrun's options, read by its own parser, and ours.

Options have to be written out: what an abbreviation means would change with each option that torch or we add, and
argparse would look for abbreviations among the script's arguments, too.
"""

from __future__ import annotations

import os
import shutil
import uuid
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.events import get_logging_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from mindx_elastic.agreement.job_key import read_key_file
from mindx_elastic.config import (
    MIN_GRACE_S,
    KeySettings,
    MemorySettings,
    Settings,
    parse_rehearse,
    parse_snapshot_every,
)
from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.notices import check_notice

__all__ = [
    "DEFAULT_MAX_RESTARTS",
    "OWN_OPTIONS",
    "AgentOptions",
    "Launch",
    "check_options",
    "make_parser",
    "parse",
]


DEFAULT_MAX_RESTARTS = 3
OWN_OPTIONS = "options of mindx-elastic, besides torchrun's"
_PROG = "mindx-elastic run"
_UNKNOWN = "unrecognized arguments: "
"""Argparse's words."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What the agent itself wants to know; checked."""

    grace_s: float
    """Seconds that workers get to stop in."""
    tell_grace: bool
    """It was given to the agent, so that the workers must know it."""
    snapshot_every: str
    """As in ``MINDX_SNAPSHOT_EVERY``."""
    rehearse: str
    """As in ``MINDX_REHEARSE``."""
    archive: str
    """As in ``MINDX_ARCHIVE``."""
    hang_timeout_s: float | None
    """Seconds without a step; None: learned, 0: never."""
    run_dir: Path
    """Absolute; exists."""
    restarts_window_s: float | None
    """Seconds within which --max-restarts counts; None: the whole job."""
    crash_loop: int
    """Failures in a row at one step that stop the job; 0: never."""
    in_place: bool
    """A dead rank is replaced while the others keep their processes, where that is possible."""
    spares: int
    """Warm processes that wait to take a dead rank's place."""
    rejoin_timeout_s: float
    """Longest time for that, before the job is restarted."""
    min_nproc: int | None
    """Fewest workers of the node that the job goes on with; None: always all of them."""
    arena_base: Path
    """Memory file system for the agent's folder."""
    job_key_file: Path | None
    """Private file with the job's key, absolute; None: none was given."""
    metrics: tuple[str, int] | None = None
    """Address and port of the metrics server; None: there is none."""
    notice: str = ""
    """Who says that this machine is about to be taken away, a cloud or a file; empty: none was named."""
    log_level: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything that the command line says."""

    options: AgentOptions
    config: LaunchConfig
    command: tuple[str, ...]
    """The worker's program and its arguments."""
    master: tuple[str, int] | None
    """MASTER_ADDR and MASTER_PORT that the user has fixed for the workers' store."""


def _seconds(low: float, high: float, *, word: str = "") -> Any:
    def read(text: str) -> float | str:
        if word and text == word:
            return text
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low <= value <= high or (word and value == 0)):
            or_word = f', or "{word}"' if word else ""
            raise ArgumentTypeError(f"{text!r}: give seconds from {low:g} to {high:g}{or_word}")
        return value

    return read


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r}: give a whole number from 0")
    return int(text)


def _checked(parse: Callable[[str, str], Any], name: str) -> Callable[[str], str]:
    """As it stands, where `parse` finds nothing wrong in it."""

    def read(text: str) -> str:
        try:
            parse(text, name)
        except UsageError as error:
            raise ArgumentTypeError(str(error)) from None
        return text

    return read


_OPTIONS: dict[str, dict[str, Any]] = {
    "--grace": {
        "type": _seconds(0.5, 86400),
        "metavar": "SECONDS",
        "help": (
            "how long workers get to save and leave, on every way to stop them (default: --shutdown-timeout, "
            "MINDX_GRACE_S, or 30)"
        ),
    },
    "--snapshot-every": {
        "type": _checked(parse_snapshot_every, "--snapshot-every"),
        "metavar": "N|auto|0",
        "help": (
            "steps between two snapshots in shared memory, which outlive a kill; auto: as often as costs less than "
            "1%% of the step time; 0: none (default: MINDX_SNAPSHOT_EVERY, or auto)"
        ),
    },
    "--rehearse": {
        "type": _checked(parse_rehearse, "--rehearse"),
        "metavar": "STEP[,STEP|,epoch]",
        "help": (
            "at these steps (epoch: the first one of the second epoch) stop as for a SIGTERM and go on in new "
            "processes, which say whether the resume is exact and what it cost; no restart is counted (default: "
            "MINDX_REHEARSE, or none)"
        ),
    },
    "--archive": {
        "metavar": "URL",
        "help": (
            "a second place for the files (s3://bucket/folder): they are uploaded behind the training, and a start on "
            "a new machine goes on from there; needs mindx_elastic[archive] (default: MINDX_ARCHIVE, or none)"
        ),
    },
    "--hang-timeout": {
        "type": _seconds(0, 1e7, word="auto"),
        "default": "auto",
        "metavar": "SECONDS|auto|0",
        "help": (
            "a rank that passes no step for so long counts as stuck: stacks are written, the others save, the job "
            "restarts; auto learns it from the steps; 0 never (default: auto)"
        ),
    },
    "--run-dir": {
        "metavar": "DIR",
        "default": "mindx-run",
        "help": "where events.jsonl, stacks and logs go (default: ./mindx-run)",
    },
    "--max-restarts-window": {
        "type": _seconds(1, 1e9),
        "metavar": "SECONDS",
        "help": "count --max-restarts over the last so many seconds, not over the whole job",
    },
    "--job-key-file": {
        "metavar": "FILE",
        "help": (
            "private file with a secret, the same on all nodes: seals what the ranks tell each other (default: "
            "MINDX_JOB_KEY_FILE or MINDX_JOB_KEY; a job of one node makes its own)"
        ),
    },
    "--crash-loop": {
        "type": _count,
        "default": 3,
        "metavar": "K",
        "help": "stop after K failures in a row at the same step; 0: never (default: 3)",
    },
    "--recover": {
        "choices": ("restart", "in-place"),
        "help": (
            "what happens when a rank dies: restart all of them, or in-place: the others keep their processes and a "
            "new one takes the dead rank's place, for programs that use guard.run(...) or Model.train (default: "
            "MINDX_RECOVER, or restart)"
        ),
    },
    "--spares": {
        "type": _count,
        "default": 0,
        "metavar": "N",
        "help": (
            "with --recover in-place: so many processes wait with the program's model built, which makes a recovery "
            "faster and takes as much memory as a rank each (default: 0)"
        ),
    },
    "--rejoin-timeout": {
        "type": _seconds(0.1, 86400),
        "default": 30.0,
        "metavar": "SECONDS",
        "help": "with --recover in-place: how long a recovery may take before the job is restarted (default: 30)",
    },
    "--min-nproc": {
        "type": _count,
        "metavar": "M",
        "help": (
            "on one node: where the new process of a dead rank fails, too, go on with fewer ranks, M at least, which "
            "accumulate over more batches (Model.train; guard.accumulation() in a loop of your own), so that the "
            "global batch stays (default: the job restarts with all ranks, or ends)"
        ),
    },
    "--notice": {
        "metavar": "aws|gce|azure|FILE",
        "help": (
            "ask the cloud's metadata service, or a file, whether this machine is about to be taken away, and then "
            "save and stop within the time that it names, with exit code 75 (default: nothing is asked)"
        ),
    },
    "--metrics-port": {
        "type": _count,
        "metavar": "N",
        "help": (
            "serve metrics for Prometheus at http://HOST:N/metrics, 0: at a free port; needs mindx_elastic[metrics] "
            "(default: none)"
        ),
    },
    "--metrics-host": {
        "metavar": "HOST",
        "help": "address of --metrics-port; 0.0.0.0 lets other machines ask (default: 127.0.0.1)",
    },
}
"""What is added to torchrun's options: arguments of `ArgumentParser.add_argument`, by name."""


def parse(
    arguments: Sequence[str],
    *,
    on_run_dir: Callable[[Path], None] = lambda path: None,
    about: str = "",
) -> Launch:
    """Read the command line after ``run``. For ``--help`` prints `about` and all options and leaves; leaves with 2
    for unknown options.

    Raises UsageError for what cannot work. Creates the run directory and torch's log directory. on_run_dir: is called
    with the former as soon as it is there; what is refused after it may be noted in it.
    """
    parser = make_parser()
    parser.usage = f"{_PROG} [OPTIONS] SCRIPT [ARGUMENTS]"
    parser.description, parser.formatter_class = about, RawDescriptionHelpFormatter
    args = parser.parse_args([*arguments])
    run_dir = _make_run_dir(args.run_dir)
    on_run_dir(run_dir)
    settings = Settings.from_env()
    options = _options(args, settings, run_dir)
    _check_script(args)
    _check_values(args)
    if args.log_dir is None:
        args.log_dir = str(options.run_dir / "logs")
    master = _simplify_rendezvous(args)
    run_path, args.run_path = args.run_path, False  # ours are new processes in any case
    if run_path:
        args.no_python = args.module = False
    try:
        config, command, command_arguments = config_from_args(args)
    except (AssertionError, ValueError, RuntimeError, OSError) as error:
        of = f"torch refuses --nnodes {args.nnodes} --nproc-per-node {args.nproc_per_node}"  # 2.9 gives no words
        raise UsageError(str(error) or of) from error
    _check_number(args, config)
    _check_backend(config)
    _check_shrinking(args, config)
    if shutil.which(str(command)) is None:
        raise UsageError(f"{command}: no such program (or it may not be executed)")
    return Launch(options=options, config=config, command=(str(command), *map(str, command_arguments)), master=master)


def check_options(options: Sequence[str]) -> None:
    """Refuse, before any job is started, what `parse` would refuse of these options of a job of one node. Raises
    UsageError. Makes and prints nothing. The script is not part of them."""
    parser = make_parser()

    def refuse(message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN)
        raise UsageError(message if unknown == message else f"{unknown.split()[0].partition('=')[0]}: no such option")

    def refuse_help(file: object = None) -> NoReturn:
        raise UsageError("-h is not an option of the agent here")

    parser.error, parser.print_help = refuse, refuse_help  # type: ignore[method-assign]
    args = parser.parse_args([*options, "script.py"])
    if args.training_script_args:
        raise UsageError(f"{args.training_script} is not an option")
    if args.module or args.no_python or args.run_path:
        raise UsageError("-m, --no-python and --run-path are no options of the agent here")
    _check_values(args)
    try:
        _, max_nodes = parse_min_max_nnodes(args.nnodes)
        if determine_local_world_size(args.nproc_per_node) < 1:
            raise UsageError(f"--nproc-per-node {args.nproc_per_node}: give at least 1")
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if max_nodes > 1:
        raise UsageError(f"--nnodes {args.nnodes}: this runs on one node; leave it out")


def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(OWN_OPTIONS)
    for name, how in _OPTIONS.items():
        names = [name, f"--{name[2:].replace('-', '_')}"] if "-" in name[2:] else [name]
        group.add_argument(*names, **how)


def make_parser() -> ArgumentParser:
    """torchrun's parser with our options."""
    try:
        parser = get_args_parser()
    except ValueError as error:  # a switch's variable, which torch reads with int()
        names = [n for n, v in os.environ.items() if n.startswith("PET_") and str(error).endswith(f": {v!r}")]
        raise UsageError(f"environment variable {' or '.join(names) or 'PET_...'}: {error}; give 1 or 0") from None
    parser.prog = _PROG
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=DEFAULT_MAX_RESTARTS)
    if "PET_MASTER_PORT" not in os.environ:
        # Before torch 2.13 the default is a number, and could not be told from a port that the user has fixed.
        parser.set_defaults(master_port=None)
    parser.allow_abbrev = False
    _add_options(parser)
    return parser


def _options(args: Namespace, settings: Settings, run_dir: Path) -> AgentOptions:
    shutdown_timeout = getattr(args, "shutdown_timeout", None)
    if shutdown_timeout is not None and not 0 <= shutdown_timeout <= 86400:
        raise UsageError(f"--shutdown-timeout {shutdown_timeout}: give seconds from 0 to 86400")
    if shutdown_timeout is not None and args.grace is None and shutdown_timeout < MIN_GRACE_S:
        logger.warning("--shutdown-timeout %s: workers get the shortest time, %g s", shutdown_timeout, MIN_GRACE_S)
        shutdown_timeout = MIN_GRACE_S
    if args.metrics_host is not None and args.metrics_port is None:
        raise UsageError(f"--metrics-host {args.metrics_host}: nothing is served without --metrics-port N")
    grace_s = args.grace if args.grace is not None else shutdown_timeout
    memory = MemorySettings.from_env()
    every = args.snapshot_every or os.environ.get("MINDX_SNAPSHOT_EVERY", "").strip() or "auto"
    return AgentOptions(
        grace_s=settings.grace_s if grace_s is None else settings.with_grace(grace_s).grace_s,
        tell_grace=grace_s is not None,
        snapshot_every=every,
        rehearse=args.rehearse or os.environ.get("MINDX_REHEARSE", ""),
        archive=settings.archive if args.archive is None else args.archive,
        hang_timeout_s=None if args.hang_timeout == "auto" else args.hang_timeout,
        run_dir=run_dir,
        restarts_window_s=args.max_restarts_window,
        crash_loop=args.crash_loop,
        in_place=(args.recover or os.environ.get("MINDX_RECOVER", "").strip()) == "in-place",
        spares=args.spares,
        rejoin_timeout_s=args.rejoin_timeout,
        min_nproc=args.min_nproc,
        arena_base=memory.base or Path("/dev/shm"),
        job_key_file=_job_key_file(args.job_key_file),
        metrics=None if args.metrics_port is None else (args.metrics_host or "127.0.0.1", args.metrics_port),
        notice=check_notice(args.notice) if args.notice is not None else "",
        log_level=settings.log_level,
    )


def _job_key_file(text: str | None) -> Path | None:
    """Read it once here: what cannot be used must not be found out by every worker."""
    if text is not None:
        path = Path(text).absolute()
        read_key_file(path, "--job-key-file")
        return path
    settings = KeySettings.from_env()
    if settings.file is not None and not settings.text:
        read_key_file(settings.file, "environment variable MINDX_JOB_KEY_FILE")
        return settings.file.absolute()
    return None


def _make_run_dir(text: str) -> Path:
    path = Path(text).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--run-dir {path} cannot be created: {error.strerror}; give another one") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--run-dir {path} cannot be written to; give another one")
    return path


def _check_script(args: Namespace) -> None:
    if args.module or args.no_python or "PYTHON_EXEC" in os.environ:
        return
    if args.training_script == "-":
        raise UsageError("-: a program that comes over stdin could not be started again; put it into a file")
    if not os.path.exists(args.training_script):
        raise UsageError(f"{args.training_script}: no such file")


def _check_values(args: Namespace) -> None:
    """What torch finds out only when it is too late for a message that names the option."""
    if not args.monitor_interval > 0:
        raise UsageError(f"--monitor-interval {args.monitor_interval:g}: give seconds above 0")
    event_handler = getattr(args, "event_log_handler", "null")  # as some others: not in all versions of torch
    try:
        get_logging_handler(event_handler)
    except KeyError:
        raise UsageError(
            f'--event-log-handler {event_handler}: not registered with torch; "null" and "console" are'
        ) from None
    for name in getattr(args, "signals_to_handle", "").split(","):
        if name.strip() in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle {name.strip()}: no process can handle that signal; leave it out")


def _check_number(args: Namespace, config: LaunchConfig) -> None:
    if config.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node {args.nproc_per_node}: give at least 1")


def _check_backend(config: LaunchConfig) -> None:
    if config.rdzv_backend not in ("c10d", "static"):
        raise UsageError(
            f"--rdzv-backend {config.rdzv_backend}: the nodes meet at one of their agents; give --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT, HOST being one of the nodes"
        )
    if config.max_nodes > 1 and config.rdzv_endpoint.endswith(":0"):
        raise UsageError(f"--rdzv-endpoint {config.rdzv_endpoint}: all nodes must know the port; give one, as 29400")


def _check_shrinking(args: Namespace, config: LaunchConfig) -> None:
    least = args.min_nproc
    if least is None:
        return
    if config.max_nodes > 1:
        raise UsageError(
            f"--min-nproc {least}: that is for one node; with several, --nnodes MIN:MAX goes on with fewer nodes"
        )
    if not 1 <= least <= config.nproc_per_node:
        raise UsageError(f"--min-nproc {least}: give a number from 1 to {config.nproc_per_node} (--nproc-per-node)")
    if config.max_restarts < 1:
        raise UsageError(f"--min-nproc {least}: fewer ranks come with a restart, and --max-restarts is 0")


def _simplify_rendezvous(args: Namespace) -> tuple[str, int] | None:
    """What torchrun's own `run` does before it reads the rest, and more of it.

    A job of one node always gets a private rendezvous on a free port, so that each restart meets in a fresh store; a
    MASTER_PORT that the user has fixed stays what the workers use.
    """
    master = None
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    elif args.rdzv_backend == "static" and not args.rdzv_endpoint:
        try:
            _, max_nodes = parse_min_max_nnodes(args.nnodes)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"--nnodes {args.nnodes}: {error}") from error
        if max_nodes == 1:
            if args.master_port is not None:
                master = (args.master_addr, args.master_port)
                args.master_addr = "127.0.0.1"
            else:
                args.rdzv_id = str(uuid.uuid4())
            args.rdzv_backend, args.rdzv_endpoint, args.node_rank = "c10d", "localhost:0", 0
    if args.master_port is None:
        args.master_port = 29500
    return master
