"""A survivor goes on as a rank of a smaller job in its own process, where nothing of it depends on the size of the job.

It has saved its boundary and left its guard, as for a restart (see `rejoin.parking`). From there it does what a new
process would do: it enters its guard with the environment of its new rank and loads what the ranks have saved. What the
program has worked out from the number of ranks would be stale: `rejoin.asked` knows where it has asked for that. Where
it has done so outside of the function of ``guard.run``, or keeps an answer from one call of it to the next, the process
ends, and the job is restarted.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import GeneratorType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindx_elastic.alarm.signals import end_lingering
from mindx_elastic.capture.rng import capture_rng, pack_rng, restore_rng
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed
from mindx_elastic.data import ResumableLoader
from mindx_elastic.data.sampler import rank_and_world_size
from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard.as_begun import AsBegun
from mindx_elastic.guard.loops.followed_loader import with_epochs_put_back
from mindx_elastic.guard.process_end import shorten_interpreter_exit
from mindx_elastic.guard.replicas import ddp_modules
from mindx_elastic.guard.variables import own_variables
from mindx_elastic.rejoin import asked, groups
from mindx_elastic.rejoin.member import Member
from mindx_elastic.rejoin.parking import Order, wait_for_order
from mindx_elastic.rejoin.spare import redirect

__all__ = ["BeforeGuard", "new_member", "stay", "watch_answers"]

_MOST_NAMED = 5
_RANK_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)


class BeforeGuard:
    """What a process has before it enters its guard for the first time. Training thread."""

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._targets = targets
        self._rng = pack_rng(capture_rng())
        self.num_threads = torch.get_num_threads()

    def changed(self, begun: AsBegun) -> str:
        """The program's own variables that the training has changed, and that a new process would begin anew."""
        before, kept = begun.variables or {}, {*map(id, self._targets.values())}
        without_epoch = with_epochs_put_back(self._targets.values())
        now = own_variables(sys._getframe(), kept, positions=True, without_epoch=without_epoch)
        names = sorted(name for name, digest in now.items() if name in before and before[name] != digest)
        return listed(names, _MOST_NAMED) if names else ""

    def put_back(self) -> None:
        """What a start with fewer ranks does not load: streams of random numbers are another rank's."""
        restore_rng(self._rng)
        for target in self._targets.values():
            if isinstance(target, nn.Module):
                for parameter in target.parameters():
                    parameter.grad = None


def stay(
    member: Member, before_guard: BeforeGuard, begun: AsBegun, targets: Mapping[str, Any], stop: GracefulExit
) -> bool:
    """With the guard left by `stop`: become a rank of the smaller job. False: this process ends instead."""
    if why := _why_not(member, before_guard, targets):
        logger.warning("rank %d cannot go on in its process with fewer ranks: %s", member.ranks.rank, why)
        return False
    agent = AgentInfo.from_env()
    assert agent is not None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    code = stop.code if isinstance(stop.code, int) else 1
    end_lingering()  # from here on a stop ends this process at once, as it does a new one that has no guard yet
    order = wait_for_order(agent.folder, code, 2 * RejoinSettings.from_env().timeout_s)
    if order is None:
        return False
    before = member.ranks
    if before.rank == min(member.keeps.ranks if member.keeps else (0,)) and (names := before_guard.changed(begun)):
        logger.warning(
            "%s: the training has changed this, and the guard does not keep it: the ranks that go on have it as it is, "
            "where a restart would begin it anew. If the training depends on it, name it in Guard(stateful={...}), or "
            "set it in the function that guard.run calls",
            names,
        )
    _follow(order)
    ranks = RankInfo.from_env()
    answers = asked.current()
    assert answers is not None, "see _why_not"
    answers.begin_anew(rank_changes=ranks.rank != before.rank)
    ddp = ddp_modules(targets)
    groups.make_default_anew([module for _, module in ddp])
    for target in targets.values():
        if isinstance(target, ResumableLoader):
            _move(target, before, ranks)
    before_guard.put_back()
    begun.put_back()
    begun.look_at_groups()
    atexit.unregister(shorten_interpreter_exit)
    logger.info("rank %d of %d goes on as rank %d of %d", before.rank, before.world_size, ranks.rank, ranks.world_size)
    return True


def _why_not(member: Member, before_guard: BeforeGuard, targets: Mapping[str, Any]) -> str:
    agent, keeps, rank = AgentInfo.from_env(), member.keeps, member.ranks.rank
    if agent is None or keeps is None or rank not in keeps.ranks:
        return "no place is left for it"
    if not member.is_replicated:
        return "the ranks hold different parts of the state"
    if torch.cuda.is_initialized():
        return "it uses a GPU"
    if _has_compiled():
        return "torch.compile has compiled part of the training, and only a restart compiles it the same again"
    answers = asked.current()
    if answers is None:
        return "it is not known what the program has asked for: it is none of this Python interpreter"
    if why := answers.problem(rank_changes=keeps.ranks[rank] != rank) or _kept(answers, member.ranks.world_size):
        return why
    if torch.get_num_threads() != before_guard.num_threads:
        return "the training has changed the number of torch's threads"
    for name, target in targets.items():
        if isinstance(target, torch.utils.data.DataLoader):
            if not isinstance(target, ResumableLoader):
                return f"{name} is no ResumableLoader (mx.data.from_loader makes one of it)"
            if _fixed_ranks(target) not in ((None, None), (rank, member.ranks.world_size)):
                return f"{name} has a rank or a world size of its own"
    ddp = ddp_modules(targets)
    return groups.why_default_stays([module for _, module in ddp]) or groups.reset_ddp(ddp)


def _kept(answers: asked.Asked, size: int) -> str:
    """What the program keeps of the function's answers in an object that shows it: samplers in a cache, and generators
    that it goes on with. The function has been left, and its variables are gone."""
    gc.collect()
    for sampler in answers.samplers():
        if sampler.num_replicas == size:
            return f"the program keeps a {type(sampler).__name__} that was made for {size} ranks"
    lines = answers.lines()
    for one in gc.get_objects():
        if type(one) is GeneratorType and one.gi_frame is not None:
            code = one.gi_code
            if any((code.co_filename, line) in lines for *_, line in code.co_lines() if line is not None):
                where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                return f"the program keeps a generator that has asked for rank or number of ranks ({where})"
    return ""


def _has_compiled() -> bool:
    """What is compiled may have the number of ranks in it: the compiler does not ask for it as the program does."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"])


def _follow(order: Order) -> None:
    """Take the environment and the files of the new rank."""
    for name in list(os.environ):
        if _is_of_rank(name) and name not in order.env:
            del os.environ[name]
    os.environ.update({name: value for name, value in order.env.items() if _is_of_rank(name)})
    for stream, path in ((sys.stdout, order.stdout), (sys.stderr, order.stderr)):
        if path:
            redirect(stream, path)


def _is_of_rank(variable: str) -> bool:
    return variable in _RANK_VARIABLES or variable.startswith(("TORCHELASTIC_", "MINDX_"))


def new_member() -> Member | None:
    """Of the rank that this process is now; None: it is alone."""
    ranks, agent = RankInfo.from_env(), AgentInfo.from_env()
    if agent is None or ranks.world_size == 1:
        return None
    member = Member(RejoinSettings.from_env(), ranks, agent)
    member.has_entered = True
    return member


def watch_answers(stack: ExitStack, end: Callable[[str, int], NoReturn]) -> Callable[[], None] | None:
    """When a guard is open: find out before the first update what the program keeps of the answers that it got as a
    rank of a larger job, and `end` the process then, with an exit code. Returns what is to be called at each boundary;
    None: nothing is.
    """
    answers = asked.current()
    if answers is None:
        return None

    def look(*_: object) -> None:
        if answers.is_opening and (why := answers.end_opening()):
            end(f"this process cannot go on as a rank of a smaller job: {why}", 1)

    def at_boundary() -> None:
        look()
        answers.pass_boundary()

    stack.callback(register_optimizer_step_pre_hook(look).remove)
    return at_boundary


def _fixed_ranks(loader: ResumableLoader) -> tuple[Any, ...]:
    return tuple(getattr(loader._sampler.ranks, "args", ()))


def _move(loader: ResumableLoader, before: RankInfo, now: RankInfo) -> None:
    if _fixed_ranks(loader) == (before.rank, before.world_size):
        loader._sampler.ranks = partial(rank_and_world_size, now.rank, now.world_size)
    loader._settings = None
