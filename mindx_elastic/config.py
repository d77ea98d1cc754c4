"""Every environment variable that the package reads, in frozen dataclasses.

Read once, when a `Guard` is entered; nothing is read at import. The table in ``docs/reference.md`` lists the same
names, values and defaults.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mindx_elastic.core.posix import boot_id
from mindx_elastic.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DEFAULT_GRACE_S",
    "MIN_GRACE_S",
    "AgentInfo",
    "ClusterSettings",
    "FaultPaths",
    "KeySettings",
    "MemorySettings",
    "ProveSettings",
    "RankInfo",
    "RedundancySettings",
    "RejoinSettings",
    "SavingSettings",
    "Settings",
    "SharingSettings",
    "ShrinkSettings",
    "TftSettings",
    "mpirun_grace_s",
    "parse_rehearse",
    "parse_snapshot_every",
]

DEFAULT_GRACE_S = 30.0  # Kubernetes' terminationGracePeriodSeconds and torchrun's own wait
MIN_GRACE_S, _MAX_GRACE_S = 0.5, 86400.0


_Read: TypeAlias = "Callable[[Mapping[str, str]], Any]"


def _from(default: Any, read: _Read, **more: Any) -> Any:
    """A field of a `_FromEnv`."""
    return field(default=default, metadata={"read": read}, **more)


@dataclass(frozen=True, kw_only=True)
class _FromEnv:
    """Settings of which each field says how it is read."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        env = os.environ if env is None else env
        return cls(**{each.name: each.metadata["read"](env) for each in fields(cls)})


def _text(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()


def _read_word(env: Mapping[str, str], name: str, default: str) -> str:
    return env.get(name, "").strip() or default


def _word(name: str, default: str = "") -> Any:
    return _from(default, partial(_read_word, name=name, default=default))


def _path(name: str, default: Path | None = None) -> Any:
    def read(env: Mapping[str, str]) -> Path | None:
        if "\0" in (text := _text(env, name)):
            raise UsageError(f"environment variable {name}={text!r} is not a path")
        return Path(text) if text else default

    return _from(default, read)


def _read_number(
    env: Mapping[str, str], name: str, default: float, *, low: float = -math.inf, high: float = math.inf
) -> float:
    if not (text := env.get(name, "").strip()):
        return default
    whole = type(default) is int
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        what = "a whole number" if whole else "a number"
        raise UsageError(f"environment variable {name}={text!r} is not {what}; unset it or give one") from None
    if not low <= value <= high:
        raise UsageError(f"environment variable {name}={text} is outside {low:g}..{high:g}")
    return value


def _number(name: str, default: float, low: float = -math.inf, high: float = math.inf) -> Any:
    """A whole number where the `default` is one."""
    return _from(default, partial(_read_number, name=name, default=default, low=low, high=high))


def _read_one_of(env: Mapping[str, str], name: str, values: Sequence[str]) -> str:
    if (value := env.get(name, "").strip() or values[0]) not in values:
        known = ", ".join(each for each in values if each)
        raise UsageError(f"environment variable {name}={value!r}: give {known} or nothing")
    return value


def _one_of(name: str, *values: str) -> Any:
    """The first of `values` is the default; it may be empty."""
    return _from(values[0], partial(_read_one_of, name=name, values=values))


def _switch(name: str, off: str, on: str, *, default: bool = False) -> Any:
    values = (on, off) if default else (off, on)
    return _from(default, lambda env: _read_one_of(env, name, values) == on)


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This process's rank and the size of its job, from torchrun's environment; without WORLD_SIZE from RANK_ID,
    RANK_SIZE and DEVICE_ID, where both of the former are set."""

    rank: int = 0
    """Global rank, from 0."""
    world_size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """Rank inside the node."""
    attempt: int = 0
    """How often the agent has restarted the workers (``TORCHELASTIC_RESTART_COUNT``)."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(f"RANK={self.rank} is outside 0..WORLD_SIZE-1 with WORLD_SIZE={self.world_size}")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RankInfo:
        env = os.environ if env is None else env
        rank, size, local = "RANK", "WORLD_SIZE", "LOCAL_RANK"
        by_id = [_text(env, name) for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID")]
        if by_id[0] and by_id[1] and not _text(env, size):
            rank, size, local = "RANK_ID", "RANK_SIZE", "DEVICE_ID"
        names = (rank, size, local, "TORCHELASTIC_RESTART_COUNT", "MINDX_ATTEMPT")
        number, count, local_number, *attempts = (int(_read_number(env, name, int(name == size))) for name in names)
        if count < 1 or not 0 <= number < count:
            raise UsageError(f"{rank}={number} is outside 0..{size}-1 with {size}={count}")
        return cls(rank=number, world_size=count, local_rank=local_number, attempt=max(attempts))


def mpirun_grace_s(env: Mapping[str, str]) -> float | None:
    """Seconds from SIGTERM to SIGKILL under the mpirun of Open MPI 4; None: it has not started this process. That of
    Open MPI 5, which is PRRTE, hands no SIGTERM on (`platforms.launchers`)."""
    if _text(env, "PRTE_LAUNCHED") or not _text(env, "OMPI_COMM_WORLD_SIZE"):
        return None
    return _read_number(env, "OMPI_MCA_odls_base_sigkill_timeout", 1.0, low=0.0, high=_MAX_GRACE_S)


def _read_grace_s(env: Mapping[str, str]) -> float:
    """Where the operator says nothing: when the launcher (torchrun, our agent, mpirun) kills its workers. torch itself
    reads a whole number."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    seconds = _read_number(env, name, int(DEFAULT_GRACE_S), low=0, high=_MAX_GRACE_S)
    if not _text(env, name) and (grace_s := mpirun_grace_s(env)) is not None:
        seconds = grace_s
    return _read_number(env, "MINDX_GRACE_S", max(MIN_GRACE_S, float(seconds)), low=MIN_GRACE_S, high=_MAX_GRACE_S)


def _read_log_level(env: Mapping[str, str]) -> str:
    level = _text(env, "MINDX_LOG_LEVEL").upper() or "INFO"
    return _read_one_of({"MINDX_LOG_LEVEL": level}, "MINDX_LOG_LEVEL", ("INFO", "DEBUG", "WARNING", "ERROR"))


def _read_graceful_exit(env: Mapping[str, str]) -> bool | None:
    flag = _read_one_of(env, "MS_ENABLE_GRACEFUL_EXIT", ("", "1", "0"))
    return None if flag == "" else flag == "1"


def _words(name: str) -> Any:
    return _from((), lambda env: tuple(filter(None, map(str.strip, env.get(name, "").split(",")))))


@dataclass(frozen=True, kw_only=True)
class Settings(_FromEnv):
    """Behaviour that an operator may set from outside, without touching the script."""

    grace_s: float = _from(DEFAULT_GRACE_S, _read_grace_s)
    """``MINDX_GRACE_S``, else ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, else what mpirun gives: seconds between an alarm and
    the moment the process must be gone."""
    agreement_s: float = _number("MINDX_AGREEMENT_S", 5.0, low=0.1, high=3600)
    """Longest wait for the other ranks' offers before every rank acts alone."""
    flag_poll_s: float = _number("MINDX_FLAG_POLL_S", 0.2, low=0.02, high=60)
    """How often the flag file is looked at (off the training thread)."""
    graceful_exit: bool | None = _from(None, _read_graceful_exit)
    """``MS_ENABLE_GRACEFUL_EXIT``: 1 watches the flag file, 0 never; unset: only where a file is named."""
    final_save: bool = _switch("MINDX_FINAL_SAVE", "0", "1", default=True)
    """Keep the last boundary of a training that ends by itself."""
    overlap: bool = _switch("MINDX_OVERLAP", "0", "1", default=True)
    """A stopped job makes one step more, which the next start is compared with."""
    rehearse: tuple[int | str, ...] = _from(
        (), lambda env: parse_rehearse(env.get("MINDX_REHEARSE"), "environment variable MINDX_REHEARSE")
    )
    """Where the job stops and goes on in new processes, to try its resume; see `parse_rehearse`."""
    rehearse_by_exit: bool = _switch("MINDX_REHEARSE_EXIT", "0", "1")
    """The platform starts a process again that has left with 75."""
    rehearsed: int = _number("MINDX_REHEARSED", 0)
    """The step at which this run was rehearsed last; set by what has begun it again."""
    archive: str = _from("", methodcaller("get", "MINDX_ARCHIVE", ""))
    """URL of the second place of the files; empty: there is none."""
    unmanaged: str = _one_of("MINDX_UNMANAGED", "error", "warn")
    """``error`` refuses state that is certain not to be kept, ``warn`` only says so."""
    odd: str = _one_of("MINDX_ODD", "ignore", "back", "stop")
    """What to do about a step whose loss is no number; see `guard.odd_steps`."""
    log_level: str = _from("INFO", _read_log_level)
    """``MINDX_LOG_LEVEL``: level of the package's own logger."""
    zygote: str = _one_of("MINDX_ZYGOTE", "", "1", "0", "first")
    """1 lets the agent fork restarted workers, ``first`` those of the first attempt as well, 0 has it start fresh
    interpreters. Unset: ``first`` with ``--recover in-place``, where a rank that dies soon is not to wait for the
    imports of its replacement, else 1."""
    preload: tuple[str, ...] = _words("MINDX_PRELOAD")
    """Modules that the process imports from which workers are forked."""

    def with_grace(self, grace_s: float) -> Settings:
        """The same settings with another grace period, in seconds. Raises UsageError for anything but 0.5..86400."""
        if (
            isinstance(grace_s, bool)
            or not isinstance(grace_s, (int, float))
            or not (MIN_GRACE_S <= grace_s <= _MAX_GRACE_S)
        ):
            raise UsageError(f"grace_s={grace_s!r}: give seconds from {MIN_GRACE_S:g} to {_MAX_GRACE_S:g}")
        return replace(self, grace_s=float(grace_s))


@dataclass(frozen=True, kw_only=True)
class AgentInfo:
    """The agent that has started this worker (`mindx-elastic run` sets all of it)."""

    folder: Path
    """``MINDX_AGENT_DIR``: the agent's private folder."""
    pid: int = 0
    """``MINDX_AGENT_PID``."""
    run_dir: Path | None = None
    """``MINDX_RUN_DIR``: where stacks of a hang go."""
    attempt: int = 0
    """``MINDX_ATTEMPT``: how often the agent has started the workers before."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> AgentInfo | None:
        """None: there is no agent."""
        env = os.environ if env is None else env
        folder, run_dir = _text(env, "MINDX_AGENT_DIR"), _text(env, "MINDX_RUN_DIR")
        pid, attempt = (int(_read_number(env, name, 0)) for name in ("MINDX_AGENT_PID", "MINDX_ATTEMPT"))
        if not folder:
            return None
        return cls(folder=Path(folder), pid=pid, run_dir=Path(run_dir) if run_dir else None, attempt=attempt)


@dataclass(frozen=True, kw_only=True)
class RejoinSettings(_FromEnv):
    """Recovery in place, see `rejoin`. The agent sets all of it but ``MINDX_REJOIN_NCCL`` and ``MINDX_REJOIN_MOST``."""

    in_place: bool = _switch("MINDX_RECOVER", "restart", "in-place")
    """Keep the processes of the ranks that live when another one dies."""
    generation: int = _number("MINDX_REJOIN", 0)
    """The recovery that this process has been started for; 0: none."""
    pipe: str | None = _from(None, lambda env: _text(env, "MINDX_SPARE") or None)
    """The named pipe on which a spare is told its rank; None: this process is none."""
    timeout_s: float = _number("MINDX_REJOIN_TIMEOUT_S", 30.0, low=0.1, high=86400)
    """Longest wait for the others in a recovery, before the job is restarted."""
    most: int = _number("MINDX_REJOIN_MOST", 100)
    """After so many recoveries in one attempt the next death restarts the job: each leaves a little memory in the
    survivors."""
    job: str = _word("MINDX_JOB_ID")
    """Name of the job that no other one has, the same on all nodes and after restarts; empty: it has none."""
    nccl: bool = _switch("MINDX_REJOIN_NCCL", "0", "1")
    """Recover process groups of NCCL in place, too; run with ranks on one GPU only."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(_FromEnv):
    """What a process of a dynamic cluster is told from outside, see `cluster`."""

    role: str = _one_of("MS_ROLE", "", "MS_SCHED", "MS_WORKER")
    size: int = _number("MS_WORKER_NUM", 0, low=1, high=100_000)
    """Number of workers, the same for all processes."""
    host: str = _word("MS_SCHED_HOST")
    """Where the scheduler listens, and all workers reach it."""
    port: int = _number("MS_SCHED_PORT", 0, low=1, high=65535)
    node_id: str = _word("MS_NODE_ID")
    """Empty: the scheduler gives a name. A number below `size` is the rank."""
    recovery: bool = _switch("MS_ENABLE_RECOVERY", "0", "1")
    """Wait for a process that takes a dead one's place."""
    recovery_path: Path | None = _path("MS_RECOVERY_PATH")
    """Folder of the scheduler's table."""
    heartbeat_s: float = _from(
        5.0,
        lambda env: _read_number(
            env, "MINDX_HEARTBEAT_S" if _text(env, "MINDX_HEARTBEAT_S") else "MS_NODE_TIMEOUT", 5.0, low=0.5, high=3600
        ),
    )
    """A process that is not heard for so long is dead."""
    formation_s: float = _number("MS_TOPO_TIMEOUT", 600.0, low=1, high=7 * 86400)
    """How long all workers may take to be there, at the start and after a death."""
    device: int | None = _from(
        None,
        lambda env: int(_read_number(env, "DEVICE_ID", 0, low=0, high=1 << 16)) if _text(env, "DEVICE_ID") else None,
    )
    """The device of this process; None: by its order on the machine."""

    @property
    def is_scheduler(self) -> bool:
        return self.role == "MS_SCHED"

    @classmethod
    def find(cls, env: Mapping[str, str] | None = None) -> Self | None:
        """None: this process is in no dynamic cluster. Raises UsageError, which names all variables that are missing,
        or a wrong one."""
        env = os.environ if env is None else env
        if not _text(env, "MS_ROLE") and _text(env, "MS_WORKER_NUM") in ("", "1"):
            return None
        found = cls.from_env(env)
        needed = {"MS_ROLE": found.role, "MS_WORKER_NUM": found.size}
        needed |= {"MS_SCHED_HOST": found.host, "MS_SCHED_PORT": found.port}
        if found.is_scheduler and found.recovery:
            needed["MS_RECOVERY_PATH"] = str(found.recovery_path or "")
        if missing := [name for name, value in needed.items() if not value]:
            raise UsageError(f"the dynamic cluster cannot be formed: set {', '.join(missing)}, as docs/porting.md says")
        return found


@dataclass(frozen=True, kw_only=True)
class ShrinkSettings(_FromEnv):
    """A job that may go on with fewer ranks than it was started with. The agent sets all of it."""

    full_size: int = _number("MINDX_FULL_WORLD_SIZE", 0)
    """The number of ranks that the job is meant to have; 0: it has always as many as now."""
    places: tuple[int, ...] = _from(
        (), lambda env: tuple(int(n) for n in env.get("MINDX_PLACES", "").split(",") if n.strip().isdecimal())
    )
    """Which of the node's places (devices) the ranks have, by local rank."""

    def is_shrunk(self, world_size: int) -> bool:
        """Whether `world_size` ranks are fewer than the job is meant to have."""
        return 0 < world_size < self.full_size

    def shares(self, world_size: int) -> int:
        """Among how many ranks the data are shared out where `world_size` are there: all of the whole job, if those
        that are there stand in for the others."""
        return self.full_size if self.is_shrunk(world_size) else world_size


@dataclass(frozen=True, kw_only=True)
class KeySettings(_FromEnv):
    """What seals the ranks' messages, see `agreement.job_key`."""

    text: str = _from("", lambda env: _text(env, "MINDX_JOB_KEY"), repr=False)
    """The key itself; empty: not given."""
    file: Path | None = _path("MINDX_JOB_KEY_FILE")
    """Private file with the key; None: not given."""
    local_world_size: int = _number("LOCAL_WORLD_SIZE", 0)
    """How many ranks this node's launcher has started; 0: it does not tell."""


def _read_base(env: Mapping[str, str]) -> Path | None:
    base = _text(env, "MINDX_ARENA_DIR") or "/dev/shm"
    return None if base == "none" else Path(base)


@dataclass(frozen=True, kw_only=True)
class MemorySettings(_FromEnv):
    """Where and how often snapshots go to shared memory, see `memory`."""

    base: Path | None = _from(Path("/dev/shm"), _read_base)
    """``MINDX_ARENA_DIR``: a memory file system; ``none`` (None here): no snapshots in memory."""
    snapshot_every: int | None = _from(
        0, lambda env: parse_snapshot_every(_text(env, "MINDX_SNAPSHOT_EVERY") or "0", "MINDX_SNAPSHOT_EVERY")
    )
    """Steps between two snapshots, 0 for none, ``auto`` (None here) to measure it."""

    def with_every(self, snapshot_every: object) -> MemorySettings:
        """The same settings with another interval, unless that is None."""
        if snapshot_every is None:
            return self
        return replace(self, snapshot_every=parse_snapshot_every(snapshot_every, "snapshot_every"))


@dataclass(frozen=True, kw_only=True)
class SavingSettings(_FromEnv):
    """How a save is made: what replicas share (`guard.divided_saves`), and its way to the disk
    (`persist.direct_io`)."""

    divide: str = _one_of("MINDX_DIVIDED_SAVES", "auto", "always", "never")
    """``auto`` divides the state of a stop among the ranks of a machine where that is worth it, ``always`` also a small
    state, ``never`` has each rank write all it has."""
    page_cache: bool = _switch("MINDX_PAGE_CACHE", "never", "always")
    """Save through the page cache, which is faster on some disks, and not around it. ``mindx-elastic doctor`` measures
    both."""


@dataclass(frozen=True, kw_only=True)
class RedundancySettings(_FromEnv):
    """On how many nodes each checkpoint file is stored, see `mirror`."""

    copies: int = _from(
        1,
        lambda env: _parse_copies(_read_number(env, "MINDX_REDUNDANCY", 1), "environment variable MINDX_REDUNDANCY"),
    )
    """1 to 64; 1: only on the node of the rank that writes it."""
    node: str = _word("GROUP_RANK")
    """Number of the node, as torchrun and our agent set it; empty: by host name and boot."""

    def with_copies(self, redundancy: object) -> RedundancySettings:
        """The same settings with another number, unless that is None."""
        return self if redundancy is None else replace(self, copies=_parse_copies(redundancy, "redundancy"))

    def node_name(self) -> str:
        """The same for all ranks of a node, and different on different nodes."""
        if self.node:
            return f"node {self.node}"
        try:
            return f"{socket.gethostname()}/{boot_id()}"
        except OSError:
            return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class ProveSettings(_FromEnv):
    """Set by `mindx-elastic prove` and `drill` for the runs that they start."""

    control: Path | None = _path("MINDX_PROVE")
    """The control file of the run; None: an ordinary run."""


@dataclass(frozen=True, kw_only=True)
class SharingSettings(_FromEnv):
    """Which directories, and files of which users, a job accepts, see `owners`."""

    allow_shared: bool = _switch("MINDX_ALLOW_SHARED_DIRECTORY", "0", "1")
    """Accept directories that every user may write to."""
    trusted_users: tuple[int | str, ...] = _words("MINDX_TRUSTED_USERS")
    """Users, by number or name and with commas between, whose files count too."""

    def with_arguments(self, allow_shared: bool, trusted_users: Iterable[int | str]) -> SharingSettings:
        """The same settings, with what the program allows in addition."""
        if isinstance(trusted_users, (str, int)):
            raise UsageError(f"trusted_users={trusted_users!r}: give a list of users, by number or name")
        users = (*self.trusted_users, *trusted_users)
        return replace(self, allow_shared=self.allow_shared or bool(allow_shared), trusted_users=users)


def _parse_copies(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
        raise UsageError(f"{name}={value!r}: give the number of nodes that store each file, from 1 to 64")
    return value


def parse_snapshot_every(value: object, name: str) -> int | None:
    """``auto`` -> None, else a number of steps from 0. Raises UsageError that names `name`."""
    text = str(value).strip()
    if text == "auto":
        return None
    if isinstance(value, bool) or not text.isdecimal() or int(text) > 10**9:
        raise UsageError(f'{name}={value!r}: give a number of steps, 0 for no snapshots, or "auto"')
    return int(text)


def parse_rehearse(value: object, name: str) -> tuple[int | str, ...]:
    """``20``, ``[20, "epoch"]`` or ``"20,100,epoch"`` -> the places; None or ``""``: none. Raises UsageError that names
    `name`."""
    listed = value if isinstance(value, (list, tuple)) else [] if value is None else str(value).split(",")
    words = [str(each).strip() for each in listed if not isinstance(each, str) or each.strip()]
    if isinstance(value, bool) or any(word != "epoch" and not (word.isdecimal() and int(word)) for word in words):
        raise UsageError(
            f'{name}={value!r}: give steps from 1, "epoch" (the first step of the second epoch), or both: 20,epoch'
        )
    return tuple(word if word == "epoch" else int(word) for word in words)


@dataclass(frozen=True, kw_only=True)
class FaultPaths(_FromEnv):
    """Where the platform reports faults."""

    fault_dir: Path = _path("MINDX_FAULT_DIR", Path("/user/restore/fault/config"))
    """Folder with the key file ``fault-npus``."""
    reset_dir: Path = _path("MINDX_RESET_DIR", Path("/user/restore/reset/config"))
    """Folder with ``reset.json``."""


def _read_switched_on(env: Mapping[str, str]) -> frozenset[str]:
    """Spaces, quotes, missing braces, ``=`` for ``:`` and small letters are all accepted; MindSpore's pages also have
    ``{TTP:1 UCE:1}``."""
    text, enabled = env.get("MS_ENABLE_TFT", ""), set()
    switches = re.sub(r"\s*[:=]\s*", ":", text.translate(str.maketrans("{}\"';", "     ")))
    for item in switches.replace(",", " ").split():
        name, _, value = item.partition(":")
        if not name.isidentifier() or value.lower() not in ("0", "1", "true", "false"):
            raise UsageError(f"environment variable MS_ENABLE_TFT={text!r}: give '{{TTP:1}}'; {item!r} is not a switch")
        if value.lower() in ("1", "true"):
            enabled.add(name.upper())
    return frozenset(enabled)


@dataclass(frozen=True, kw_only=True)
class TftSettings(_FromEnv):
    """MindSpore's switch for its fault tolerance, ``MS_ENABLE_TFT='{TTP:1}'``."""

    enabled: frozenset[str] = _from(frozenset(), _read_switched_on)
    """``MS_ENABLE_TFT``: names that are switched on. Only TTP (save when the job dies) has an effect; for the others
    see `train.tft`, and unknown names are accepted."""
    for_mindspore: bool = _from(False, lambda env: _text(env, "MINDIO_FOR_MINDSPORE").lower() in ("1", "true"))
    """``MINDIO_FOR_MINDSPORE``: accepted, without effect."""

    @property
    def ttp(self) -> bool:
        """As in MindSpore, also with UCE or ARF."""
        return not self.enabled.isdisjoint(("TTP", "UCE", "ARF"))
