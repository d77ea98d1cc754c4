"""``mindx-elastic run``: from a command line to an exit code."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic import events as torch_events
from torch.distributed.elastic import metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters

from mindx_elastic.agent import child
from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.forked_start import ForkedStart
from mindx_elastic.agent.history import identity, render
from mindx_elastic.agent.inbox import SignalInbox, parse_signals
from mindx_elastic.agent.last_lines import LastLines
from mindx_elastic.agent.ledger import print_block
from mindx_elastic.agent.metrics import MetricsServer
from mindx_elastic.agent.nodes import Membership, NodeHost, host_table
from mindx_elastic.agent.options import Launch, parse
from mindx_elastic.agent.places import NodePlaces
from mindx_elastic.agent.result import ResultFile, find_progress
from mindx_elastic.agent.shrinking import Shrinking
from mindx_elastic.agent.stop_files import StopFiles
from mindx_elastic.agent.supervisor import Supervisor
from mindx_elastic.agent.zygote import WORKER_DEFAULTS
from mindx_elastic.agreement.hosting import ask_again_soon
from mindx_elastic.agreement.job_key import find_key
from mindx_elastic.alarm.alarm import signal_name
from mindx_elastic.alarm.exit_codes import EXIT_USAGE, exit_code_of_signal
from mindx_elastic.cluster.messages import How
from mindx_elastic.config import FaultPaths, KeySettings, RejoinSettings, Settings
from mindx_elastic.core.events import EVENTS_FILE, EventLog, RankFilter, attach_console, logger
from mindx_elastic.errors import UsageError
from mindx_elastic.memory.agent_folder import AgentFolder
from mindx_elastic.rejoin.nccl import DUMP, ERROR_HANDLING
from mindx_elastic.start.unused_state import find_unused_state, remarks

__all__ = ["is_alone", "launch", "run_job"]


_NEWER_FIELDS = (
    *("event_log_handler", "numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters"),
    "virtual_local_rank",
)
"""What some versions of torch from 2.6 on lack."""
_OTHERS_LEAVE_S, _OTHERS_STOP_S = 30.0, 3.0
"""How long the table is served for the other nodes, when the job has finished or ended otherwise."""
_LEVELS = {"finished": logging.INFO, "stopped": logging.WARNING}


def launch(arguments: Sequence[str], *, about: str = "") -> int:
    """Run the job that the command line describes; returns the agent's exit code. Main thread, once a process.

    about: see `options.parse`. Raises UsageError for what cannot work, before anything is started.
    """
    with ResultFile() as result:
        return _launch(parse(arguments, on_run_dir=result.open, about=about), result)


def _launch(plan: Launch, result: ResultFile) -> int:
    attach_console(RankFilter(process="mindx_elastic agent"), plan.options.log_level)
    plan = _with_possible_recovery(plan)
    options, config = plan.options, plan.config
    metrics_server = None if options.metrics is None else MetricsServer(*options.metrics, options.arena_base)
    signals = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    folder = AgentFolder(options.arena_base)

    try:
        with SignalInbox(parse_signals(signals), last=True) as inbox:
            _share_signals(inbox)
            return run_job(plan, folder, inbox, result, metrics_server)
    finally:
        if metrics_server is not None:
            metrics_server.close()
        folder.remove()


def is_alone(plan: Launch) -> bool:
    """Whether the job has one node, and no other one may stand by at an endpoint. In place there is none."""
    config = plan.config
    where = config.rdzv_endpoint
    return config.max_nodes == 1 and (plan.options.in_place or where == "" or where.endswith(":0"))


def _with_possible_recovery(plan: Launch) -> Launch:
    """In place needs a store of the workers that outlives each of them, and one agent that sees all of them."""
    config = plan.config
    if not plan.options.in_place or (config.max_nodes == 1 and config.rdzv_backend == "c10d" and plan.master is None):
        return plan
    logger.warning(
        "--recover in-place is for a job of one node, without --master-port: when a rank dies, the whole job is "
        "restarted"
    )
    return replace(plan, options=replace(plan.options, in_place=False))


def _share_signals(inbox: SignalInbox) -> None:
    """Torch takes the signals that this variable names when it starts workers. One that stays ignored must not be among
    them, not even until the inbox has put it back: workers inherit what holds at the moment they are started."""
    taken = [signal.Signals(number).name for number in inbox.taken]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(taken or ["SIGTERM"])  # empty: torch logs a traceback
    if inbox.ignored:
        names = " and ".join(signal.Signals(number).name for number in inbox.ignored)
        many = len(inbox.ignored) > 1
        logger.info(
            "%s %s ignored where the agent was started (nohup, a shell's background job) and %s so",
            *(names, "were" if many else "was", "stay" if many else "stays"),
        )


def run_job(
    plan: Launch,
    folder: AgentFolder,
    inbox: SignalInbox,
    result: ResultFile,
    metrics_server: MetricsServer | None,
) -> int:
    """As `launch`, where the signals are taken already: from the first meeting of the nodes to the exit code."""
    options, config = plan.options, plan.config
    _set_environment(plan, folder)
    events = EventLog(options.run_dir / EVENTS_FILE, run_id=config.run_id)
    _say_start(plan, folder, events)
    host: NodeHost | None = None
    membership: Membership | None = None
    supervisor = None
    lines = LastLines(folder.path, options.run_dir, config.nproc_per_node)
    code, cause = 1, None
    account: dict[str, Any] = {}
    event_log = getattr(config, "event_log_handler", "null")  # torch 2.6 has no choice
    try:
        try:
            if not is_alone(plan):
                host, membership = _join_nodes(plan)
        except ValueError as error:
            code, cause = EXIT_USAGE, f"the rendezvous cannot be opened: {error}"
            raise UsageError(cause) from error
        supervisor = _make_supervisor(plan, membership, folder, inbox, events, lines)
        if metrics_server is not None:
            supervisor.metrics = metrics_server.metrics
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        supervisor.run()
        code = supervisor.ending.code
        torch_events.record(supervisor.get_event_succeeded(), event_log)
    except SignalException as stop:
        code, cause = exit_code_of_signal(stop.sigval), signal_name(stop.sigval)
        if supervisor is not None:
            torch_events.record(supervisor.get_event_failed(), event_log)
    except Exception as error:
        if supervisor is not None:
            supervisor.note_error(error)
            torch_events.record(supervisor.get_event_failed(), event_log)
        raise
    finally:
        lines.finish()
        if supervisor is not None:
            _conclude(supervisor)
        if membership is not None:
            _leave_nodes(membership, host, None if supervisor is None else supervisor.ending)
        if supervisor is not None:
            account = _say_end(supervisor)
            cause = supervisor.ending.cause or None
        _write_result(result, supervisor, code, cause)
        events.emit(
            "agent_end",
            reason=cause,
            **identity(),
            outcome=f"{'failed' if supervisor is None else supervisor.ending.outcome}, exit code {code}",
            exit_code=code,
            **account,
        )
    return code


def _say_start(plan: Launch, folder: AgentFolder, events: EventLog) -> None:
    options, config = plan.options, plan.config
    events.emit(
        "agent_start",
        **identity(),
        agent_dir=str(folder.path),
        command=list(plan.command),
        command_line=shlex.join(["mindx-elastic", *sys.argv[1:]]),
        max_restarts=config.max_restarts,
        grace_s=options.grace_s,
    )
    least = "" if config.min_nodes == config.max_nodes else f"{config.min_nodes} to "
    nodes = "" if config.max_nodes == 1 else f" on each of {least}{config.max_nodes} nodes"
    count = f"{config.nproc_per_node} worker{'s' * (config.nproc_per_node != 1)}"
    logger.info("%s%s; run directory %s", count, nodes, options.run_dir)


def _set_environment(plan: Launch, folder: AgentFolder) -> None:
    """What the workers inherit: the same for all of them."""
    options = plan.options
    ask_again_soon()
    os.environ["MINDX_AGENT_PID"] = str(os.getpid())
    os.environ["MINDX_AGENT_DIR"] = str(folder.path)
    os.environ["MINDX_RUN_DIR"] = str(options.run_dir)
    os.environ["MINDX_SNAPSHOT_EVERY"] = options.snapshot_every
    os.environ["MINDX_REHEARSE"], os.environ["MINDX_ARCHIVE"] = options.rehearse, options.archive
    os.environ["MINDX_RECOVER"] = "in-place" if options.in_place else "restart"
    os.environ["MINDX_REJOIN_TIMEOUT_S"] = f"{options.rejoin_timeout_s:g}"
    for name in ("MINDX_FULL_WORLD_SIZE", "MINDX_PLACES", "MINDX_REHEARSED"):
        os.environ.pop(name, None)
    if options.min_nproc is not None:
        os.environ["MINDX_FULL_WORLD_SIZE"] = str(plan.config.nproc_per_node)
    if options.in_place and RejoinSettings.from_env().nccl:
        os.environ.setdefault(ERROR_HANDLING, "0")  # else torch, and its agent, end each process whose peer has died
        os.environ.setdefault(DUMP, "0")
    for name, value in WORKER_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if options.tell_grace:
        os.environ["MINDX_GRACE_S"] = f"{options.grace_s:g}"
    if options.job_key_file is not None:
        os.environ.pop("MINDX_JOB_KEY", None)  # else it would go before the file
        os.environ["MINDX_JOB_KEY_FILE"] = str(options.job_key_file)
    elif plan.config.max_nodes == 1 and not KeySettings.from_env().text:
        # By a file, not in the environment, which programs like to print.
        os.environ["MINDX_JOB_KEY_FILE"] = str(folder.make_key())


def _join_nodes(plan: Launch) -> tuple[NodeHost | None, Membership]:
    """Raises ValueError for an endpoint that is none, and UsageError."""
    config = plan.config
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    # Not the key that a job of one node has made for itself: another node may stand by.
    key = find_key(KeySettings(text=KeySettings.from_env().text, file=plan.options.job_key_file), 1)
    membership = Membership(parameters, key, workers=config.nproc_per_node, role=config.role)
    return host_table(parameters, key), membership


def _leave_nodes(membership: Membership, host: NodeHost | None, ending: Ending | None) -> None:
    """The others must not wait for this node; nor it for them, but as long as they still have to hear of the end."""
    outcome, code, cause = ("stopped", 0, "") if ending is None else (ending.outcome, ending.code, ending.cause)
    hows: dict[str, How] = {"finished": "done", "stopped": "left"}  # it has not begun: the others may go on waiting
    membership.leave(hows.get(outcome, "failed"), code, cause)
    if host is not None:
        host.close(_OTHERS_LEAVE_S if outcome == "finished" else _OTHERS_STOP_S)


def _make_supervisor(
    plan: Launch,
    membership: Membership | None,
    folder: AgentFolder,
    inbox: SignalInbox,
    events: EventLog,
    lines: LastLines,
) -> Supervisor:
    config, least = plan.config, plan.options.min_nproc
    known = {field.name for field in fields(WorkerSpec)}
    more: dict[str, Any] = {
        name: getattr(config, name) for name in _NEWER_FIELDS if name in known and hasattr(config, name)
    }
    shim = child.shim()
    handler: Any = SimpleNamespace(  # `Supervisor` needs no more of torch's rendezvous
        get_backend=lambda: "c10d",
        get_run_id=lambda: config.run_id,
        use_agent_store=plan.options.in_place,  # so that it outlives every worker
    )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=shim[0],
        args=(*shim[1:], *plan.command),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=None if plan.master is None else plan.master[0],
        master_port=None if plan.master is None else plan.master[1],
        local_addr=config.local_addr,
        **more,
    )
    assert config.logs_specs is not None
    zygote = Settings.from_env().zygote or ("first" if plan.options.in_place else "1")
    forks = ForkedStart(
        shim,
        plan.command,
        num_workers=config.nproc_per_node,
        is_on=zygote == "first"
        or (zygote == "1" and (plan.options.in_place or config.max_restarts > 0 or config.max_nodes > 1)),
        also_first=zygote == "first",
    )
    return Supervisor(
        spec,
        config.logs_specs,
        options=plan.options,
        folder=folder,
        inbox=inbox,
        events=events,
        stop_files=StopFiles(plan.options.run_dir, FaultPaths.from_env(), Settings.from_env(), plan.options.notice),
        lines=lines,
        membership=membership,
        forks=forks,
        shrinking=None if least is None else Shrinking(NodePlaces(config.nproc_per_node, least), events),
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
    )


def _conclude(supervisor: Supervisor) -> None:
    """What memory holds goes to disk."""
    ending, ledger = supervisor.ending, supervisor.ledger
    for arena in sorted(map(Path, supervisor.arenas)):
        from mindx_elastic.agent.holder import drop, flush  # see `supervisor`

        if supervisor.leaves_nothing or ending.outcome == "finished":
            drop(arena)
            continue
        flushed = flush(arena)
        ledger.note_flushed(flushed.step)
        for line in flushed.lines:
            logger.info("from memory to disk: %s", line)


def _say_end(supervisor: Supervisor) -> dict[str, Any]:
    """The account is printed; what an event says of it."""
    ending, ledger = supervisor.ending, supervisor.ledger
    totals = ledger.close()
    if ledger.is_eventful:
        print_block(render(ledger.records, ledger.recoveries))
    if supervisor.error_file:
        _hand_on_error(supervisor.error_file, ending.code)
    said = f": {ending.cause}" if ending.cause else ""
    what = {"finished": "has finished", "stopped": "has stopped"}.get(ending.outcome, "has failed")
    logger.log(_LEVELS.get(ending.outcome, logging.ERROR), "the job %s%s; exit code %d", what, said, ending.code)
    return {**asdict(totals), "directories": sorted(map(str, supervisor.directories))}


def _write_result(result: ResultFile, supervisor: Supervisor | None, code: int, cause: str | None) -> None:
    """For the script that has started the agent."""
    if supervisor is None:
        if cause is not None and code != EXIT_USAGE:  # else an error is on its way out, which is noted there
            result.write("stopped", code, cause)
        return
    in_memory, why = _kept_in_memory(supervisor)
    progress = find_progress(supervisor.ledger.records, in_memory)
    reason = "; ".join(filter(None, (cause, *why)))
    result.write(supervisor.ending.outcome, code, reason, progress, final=supervisor.is_hopeless)


def _kept_in_memory(supervisor: Supervisor) -> tuple[int, list[str]]:
    """The newest step that is in shared memory and could not be brought to disk (-1: none), and why, in words."""
    step, why = -1, list[str]()
    if any(os.path.exists(arena) for arena in supervisor.arenas):
        newest = find_progress(supervisor.ledger.records).saved_step
        for directory in sorted(supervisor.directories):
            remains = find_unused_state(directory)
            why += remarks(remains, newest)
            step = max(step, -1 if remains["in_memory"] is None else remains["in_memory"]["step"])
    return step, why


def _hand_on_error(file: str, code: int) -> None:
    """As torchrun does: the first failed worker's error file becomes ours, for the program that started the agent."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE") and os.path.isfile(file):
        try:
            get_error_handler().dump_error_file(file, code)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("the error file %s could not be handed on: %s", file, error)
