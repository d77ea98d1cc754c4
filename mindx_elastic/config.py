"""Every environment variable that the package reads, in frozen dataclasses.

Read once, when a `Guard` is entered; nothing is read at import. The table in ``docs/reference.md`` lists the same
names, values and defaults.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindx_elastic.core.posix import boot_id
from mindx_elastic.errors import UsageError

__all__ = [
    "DEFAULT_GRACE_S",
    "MIN_GRACE_S",
    "AgentInfo",
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


def _number(env: Mapping[str, str], name: str, default: float, *, low: float, high: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"environment variable {name}={text!r} is not a number; unset it or give seconds") from None
    if not low <= value <= high:
        raise UsageError(f"environment variable {name}={text} is outside {low:g}..{high:g}")
    return value


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"environment variable {name}={text!r} is not a whole number") from None


def _one_of(env: Mapping[str, str], variable: str, values: Sequence[str]) -> str:
    """The first of `values` is the default; it may be empty."""
    value = env.get(variable, "").strip() or values[0]
    if value not in values:
        known = ", ".join(each for each in values if each)
        raise UsageError(f"environment variable {variable}={value!r}: give {known} or nothing")
    return value


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
        by_id = [env.get(name, "").strip() for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID")]
        if by_id[0] and by_id[1] and not env.get(size, "").strip():
            rank, size, local = "RANK_ID", "RANK_SIZE", "DEVICE_ID"
        number, count = _integer(env, rank, 0), _integer(env, size, 1)
        if count < 1 or not 0 <= number < count:
            raise UsageError(f"{rank}={number} is outside 0..{size}-1 with {size}={count}")
        return cls(
            rank=number,
            world_size=count,
            local_rank=_integer(env, local, 0),
            attempt=max(_integer(env, "TORCHELASTIC_RESTART_COUNT", 0), _integer(env, "MINDX_ATTEMPT", 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Behaviour that an operator may set from outside, without touching the script."""

    grace_s: float = DEFAULT_GRACE_S
    """``MINDX_GRACE_S``, else ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, else what mpirun gives: seconds between an alarm and
    the moment the process must be gone."""
    agreement_s: float = 5.0
    """``MINDX_AGREEMENT_S``: longest wait for the other ranks' offers before every rank acts alone."""
    flag_poll_s: float = 0.2
    """``MINDX_FLAG_POLL_S``: how often the flag file is looked at (off the training thread)."""
    graceful_exit: bool | None = None
    """``MS_ENABLE_GRACEFUL_EXIT``: 1 watches the flag file, 0 never; unset: only where a file is named."""
    final_save: bool = True
    """``MINDX_FINAL_SAVE``: 1 keeps the last boundary of a training that ends by itself, 0 does not."""
    overlap: bool = True
    """``MINDX_OVERLAP``: 1 lets a stopped job make one step more, which the next start is compared with; 0 does not."""
    rehearse: tuple[int | str, ...] = ()
    """``MINDX_REHEARSE``: where the job stops and goes on in new processes, to try its resume; see `parse_rehearse`."""
    rehearse_by_exit: bool = False
    """``MINDX_REHEARSE_EXIT``: 1: the platform starts a process again that has left with 75."""
    rehearsed: int = 0
    """``MINDX_REHEARSED``: the step at which this run was rehearsed last; set by what has begun it again."""
    unmanaged: str = "error"
    """``MINDX_UNMANAGED``: ``error`` refuses state that is certain not to be kept, ``warn`` only says so."""
    log_level: str = "INFO"
    """``MINDX_LOG_LEVEL``: level of the package's own logger."""
    zygote: str = ""
    """``MINDX_ZYGOTE``: 1 lets the agent fork restarted workers, ``first`` those of the first attempt as well, 0 has it
    start fresh interpreters. Unset: ``first`` with ``--recover in-place``, where a rank that dies soon is not to wait
    for the imports of its replacement, else 1."""
    preload: tuple[str, ...] = ()
    """``MINDX_PRELOAD``: modules that the process imports from which workers are forked."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if env is None else env
        flag = _one_of(env, "MS_ENABLE_GRACEFUL_EXIT", ("", "1", "0"))
        level = env.get("MINDX_LOG_LEVEL", "").strip().upper() or "INFO"
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise UsageError(f"environment variable MINDX_LOG_LEVEL={level!r}: DEBUG, INFO, WARNING or ERROR")
        return cls(
            grace_s=_number(env, "MINDX_GRACE_S", _launcher_grace_s(env), low=MIN_GRACE_S, high=_MAX_GRACE_S),
            agreement_s=_number(env, "MINDX_AGREEMENT_S", 5.0, low=0.1, high=3600),
            flag_poll_s=_number(env, "MINDX_FLAG_POLL_S", 0.2, low=0.02, high=60),
            graceful_exit=None if flag == "" else flag == "1",
            final_save=_one_of(env, "MINDX_FINAL_SAVE", ("1", "0")) == "1",
            overlap=_one_of(env, "MINDX_OVERLAP", ("1", "0")) == "1",
            rehearse=parse_rehearse(env.get("MINDX_REHEARSE"), "environment variable MINDX_REHEARSE"),
            rehearse_by_exit=_one_of(env, "MINDX_REHEARSE_EXIT", ("0", "1")) == "1",
            rehearsed=_integer(env, "MINDX_REHEARSED", 0),
            unmanaged=_one_of(env, "MINDX_UNMANAGED", ("error", "warn")),
            log_level=level,
            zygote=_one_of(env, "MINDX_ZYGOTE", ("", "1", "0", "first")),
            preload=tuple(filter(None, map(str.strip, env.get("MINDX_PRELOAD", "").split(",")))),
        )

    def with_grace(self, grace_s: float) -> Settings:
        """The same settings with another grace period, in seconds. Raises UsageError for anything but 0.5..86400."""
        if (
            isinstance(grace_s, bool)
            or not isinstance(grace_s, (int, float))
            or not (MIN_GRACE_S <= grace_s <= _MAX_GRACE_S)
        ):
            raise UsageError(f"grace_s={grace_s!r}: give seconds from {MIN_GRACE_S:g} to {_MAX_GRACE_S:g}")
        return replace(self, grace_s=float(grace_s))


def mpirun_grace_s(env: Mapping[str, str]) -> float | None:
    """Seconds from SIGTERM to SIGKILL under the mpirun of Open MPI 4; None: it has not started this process. That of
    Open MPI 5, which is PRRTE, hands no SIGTERM on (`platforms.launchers`)."""
    if env.get("PRTE_LAUNCHED", "").strip() or not env.get("OMPI_COMM_WORLD_SIZE", "").strip():
        return None
    return _number(env, "OMPI_MCA_odls_base_sigkill_timeout", 1.0, low=0.0, high=_MAX_GRACE_S)


def _launcher_grace_s(env: Mapping[str, str]) -> float:
    """Seconds after which the launcher (torchrun, our agent, mpirun) kills its workers. torch itself reads a whole
    number."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    if not env.get(name, "").strip() and (grace_s := mpirun_grace_s(env)) is not None:
        return max(MIN_GRACE_S, grace_s)
    seconds = _integer(env, name, int(DEFAULT_GRACE_S))
    if not 0 <= seconds <= _MAX_GRACE_S:
        raise UsageError(f"environment variable {name}={seconds} is outside 0..{_MAX_GRACE_S:g}")
    return max(MIN_GRACE_S, float(seconds))


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
        folder, run_dir = env.get("MINDX_AGENT_DIR", "").strip(), env.get("MINDX_RUN_DIR", "").strip()
        pid, attempt = _integer(env, "MINDX_AGENT_PID", 0), _integer(env, "MINDX_ATTEMPT", 0)
        if not folder:
            return None
        return cls(folder=Path(folder), pid=pid, run_dir=Path(run_dir) if run_dir else None, attempt=attempt)


@dataclass(frozen=True, kw_only=True)
class RejoinSettings:
    """Recovery in place, see `rejoin`. The agent sets all of it but ``MINDX_REJOIN_NCCL`` and ``MINDX_REJOIN_MOST``."""

    in_place: bool = False
    """``MINDX_RECOVER``: ``in-place`` keeps the processes of the ranks that live when another one dies; ``restart``."""
    generation: int = 0
    """``MINDX_REJOIN``: the recovery that this process has been started for; 0: none."""
    pipe: str | None = None
    """``MINDX_SPARE``: the named pipe on which a spare is told its rank; None: this process is none."""
    timeout_s: float = 30.0
    """``MINDX_REJOIN_TIMEOUT_S``: longest wait for the others in a recovery, before the job is restarted."""
    most: int = 100
    """``MINDX_REJOIN_MOST``: after so many recoveries in one attempt the next death restarts the job: each leaves a
    little memory in the survivors."""
    job: str = ""
    """``MINDX_JOB_ID``: name of the job that no other one has, the same on all nodes and after restarts; empty: it has
    none."""
    nccl: bool = False
    """``MINDX_REJOIN_NCCL``: ``1`` recovers process groups of NCCL in place, too; run with ranks on one GPU only."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RejoinSettings:
        env = os.environ if env is None else env
        return cls(
            in_place=_one_of(env, "MINDX_RECOVER", ("restart", "in-place")) == "in-place",
            generation=_integer(env, "MINDX_REJOIN", 0),
            pipe=env.get("MINDX_SPARE", "").strip() or None,
            timeout_s=_number(env, "MINDX_REJOIN_TIMEOUT_S", 30.0, low=0.1, high=86400),
            most=_integer(env, "MINDX_REJOIN_MOST", 100),
            job=env.get("MINDX_JOB_ID", "").strip(),
            nccl=_one_of(env, "MINDX_REJOIN_NCCL", ("0", "1")) == "1",
        )


@dataclass(frozen=True, kw_only=True)
class ShrinkSettings:
    """A job that may go on with fewer ranks than it was started with. The agent sets all of it."""

    full_size: int = 0
    """``MINDX_FULL_WORLD_SIZE``: the number of ranks that the job is meant to have; 0: it has always as many as now."""
    places: tuple[int, ...] = ()
    """``MINDX_PLACES``: which of the node's places (devices) the ranks have, by local rank."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ShrinkSettings:
        env = os.environ if env is None else env
        places = tuple(int(each) for each in env.get("MINDX_PLACES", "").split(",") if each.strip().isdecimal())
        return cls(full_size=_integer(env, "MINDX_FULL_WORLD_SIZE", 0), places=places)

    def is_shrunk(self, world_size: int) -> bool:
        """Whether `world_size` ranks are fewer than the job is meant to have."""
        return 0 < world_size < self.full_size

    def shares(self, world_size: int) -> int:
        """Among how many ranks the data are shared out where `world_size` are there: all of the whole job, if those
        that are there stand in for the others."""
        return self.full_size if self.is_shrunk(world_size) else world_size


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """What seals the ranks' messages, see `agreement.job_key`."""

    text: str = field(default="", repr=False)
    """``MINDX_JOB_KEY``: the key itself; empty: not given."""
    file: Path | None = None
    """``MINDX_JOB_KEY_FILE``: private file with the key; None: not given."""
    local_world_size: int = 0
    """``LOCAL_WORLD_SIZE``: how many ranks this node's launcher has started; 0: it does not tell."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> KeySettings:
        env = os.environ if env is None else env
        file = env.get("MINDX_JOB_KEY_FILE", "").strip()
        return cls(
            text=env.get("MINDX_JOB_KEY", "").strip(),
            file=Path(file) if file else None,
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", 0),
        )


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Where and how often snapshots go to shared memory, see `memory`."""

    base: Path | None = Path("/dev/shm")
    """``MINDX_ARENA_DIR``: a memory file system; ``none`` (None here): no snapshots in memory."""
    snapshot_every: int | None = 0
    """``MINDX_SNAPSHOT_EVERY``: steps between two snapshots, 0 for none, ``auto`` (None here) to measure it."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> MemorySettings:
        env = os.environ if env is None else env
        base = env.get("MINDX_ARENA_DIR", "").strip() or "/dev/shm"
        every = parse_snapshot_every(env.get("MINDX_SNAPSHOT_EVERY", "").strip() or "0", "MINDX_SNAPSHOT_EVERY")
        return cls(base=None if base == "none" else Path(base), snapshot_every=every)

    def with_every(self, snapshot_every: object) -> MemorySettings:
        """The same settings with another interval, unless that is None."""
        if snapshot_every is None:
            return self
        return replace(self, snapshot_every=parse_snapshot_every(snapshot_every, "snapshot_every"))


@dataclass(frozen=True, kw_only=True)
class SavingSettings:
    """How a save is made: what replicas share (`guard.divided_saves`), and its way to the disk
    (`persist.direct_io`)."""

    divide: str = "auto"
    """``MINDX_DIVIDED_SAVES``: ``auto`` divides the state of a stop among the ranks of a machine where that is worth
    it, ``always`` also a small state, ``never`` has each rank write all it has."""
    page_cache: bool = False
    """``MINDX_PAGE_CACHE``: ``always`` saves through the page cache, which is faster on some disks; ``never``, the
    default, around it. ``mindx-elastic doctor`` measures both."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> SavingSettings:
        env = os.environ if env is None else env
        divide = _one_of(env, "MINDX_DIVIDED_SAVES", ("auto", "always", "never"))
        return cls(divide=divide, page_cache=_one_of(env, "MINDX_PAGE_CACHE", ("never", "always")) == "always")


@dataclass(frozen=True, kw_only=True)
class RedundancySettings:
    """On how many nodes each checkpoint file is stored, see `mirror`."""

    copies: int = 1
    """``MINDX_REDUNDANCY``: 1 to 64; 1: only on the node of the rank that writes it."""
    node: str = ""
    """``GROUP_RANK``: number of the node, as torchrun and our agent set it; empty: by host name and boot."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RedundancySettings:
        env = os.environ if env is None else env
        copies = _parse_copies(_integer(env, "MINDX_REDUNDANCY", 1), "environment variable MINDX_REDUNDANCY")
        return cls(copies=copies, node=env.get("GROUP_RANK", "").strip())

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
class ProveSettings:
    """Set by `mindx-elastic prove` and `drill` for the runs that they start."""

    control: Path | None = None
    """``MINDX_PROVE``: the control file of the run; None: an ordinary run."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ProveSettings:
        env = os.environ if env is None else env
        text = env.get("MINDX_PROVE", "").strip()
        return cls(control=Path(text) if text else None)


@dataclass(frozen=True, kw_only=True)
class SharingSettings:
    """Which directories, and files of which users, a job accepts, see `owners`."""

    allow_shared: bool = False
    """``MINDX_ALLOW_SHARED_DIRECTORY``: 1 accepts directories that every user may write to."""
    trusted_users: tuple[int | str, ...] = ()
    """``MINDX_TRUSTED_USERS``: users, by number or name and with commas between, whose files count too."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> SharingSettings:
        env = os.environ if env is None else env
        allow = _one_of(env, "MINDX_ALLOW_SHARED_DIRECTORY", ("0", "1"))
        users = (user.strip() for user in env.get("MINDX_TRUSTED_USERS", "").split(","))
        return cls(allow_shared=allow == "1", trusted_users=tuple(user for user in users if user))

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
class FaultPaths:
    """Where the platform reports faults."""

    fault_dir: Path = Path("/user/restore/fault/config")
    """``MINDX_FAULT_DIR``: folder with the key file ``fault-npus``."""
    reset_dir: Path = Path("/user/restore/reset/config")
    """``MINDX_RESET_DIR``: folder with ``reset.json``."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> FaultPaths:
        env = os.environ if env is None else env

        def path(name: str) -> Path | None:
            text = env.get(name, "").strip()
            if "\0" in text:
                raise UsageError(f"environment variable {name}={text!r} is not a path")
            return Path(text) if text else None

        return cls(
            fault_dir=path("MINDX_FAULT_DIR") or cls.fault_dir,
            reset_dir=path("MINDX_RESET_DIR") or cls.reset_dir,
        )


@dataclass(frozen=True, kw_only=True)
class TftSettings:
    """MindSpore's switch for its fault tolerance, ``MS_ENABLE_TFT='{TTP:1}'``."""

    enabled: frozenset[str] = field(default_factory=frozenset)
    """``MS_ENABLE_TFT``: names that are switched on. Only TTP (save when the job dies) has an effect; UCE, HCCE, ARF,
    TRE, TSP, RSC and unknown names are accepted."""
    for_mindspore: bool = False
    """``MINDIO_FOR_MINDSPORE``: accepted, without effect."""

    @property
    def ttp(self) -> bool:
        return "TTP" in self.enabled

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> TftSettings:
        """Spaces, quotes, missing braces, ``=`` for ``:`` and small letters are all accepted."""
        env = os.environ if env is None else env
        text = env.get("MS_ENABLE_TFT", "")
        enabled = set()
        for item in text.translate(str.maketrans("", "", "{}\"' \t\n")).replace(";", ",").split(","):
            name, _, value = item.replace("=", ":").partition(":")
            if not item:
                continue
            if not name.isidentifier() or value.lower() not in ("0", "1", "true", "false"):
                raise UsageError(
                    f"environment variable MS_ENABLE_TFT={text!r}: give '{{TTP:1}}'; {item!r} is not a switch"
                )
            if value.lower() in ("1", "true"):
                enabled.add(name.upper())
        mindio = env.get("MINDIO_FOR_MINDSPORE", "").strip().lower()
        return cls(enabled=frozenset(enabled), for_mindspore=mindio in ("1", "true"))
