"""Parts of the loop that need no training: windows, batches, the running loss, the stop of several ranks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError
from mindx_elastic.train.callbacks import CallbackList, CallbackParams, RunContext, as_callback_list
from mindx_elastic.train.loop import EpochLoss, TrainLoop, Unguarded, windows
from mindx_elastic.train.parallel import choose_device, is_parallel, without_ddp, wrap_network
from mindx_elastic.train.step import batch_size, move_batch, network_arguments, split_batch
from tests.train.small_job import make_model, make_network


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def test_windows() -> None:
    assert list(windows(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(windows(iter([]), 3)) == []


def test_a_window_fetches_nothing_beyond_itself() -> None:
    fetched: list[int] = []
    batches = (fetched.append(i) or i for i in range(10))  # type: ignore[func-returns-value]
    found = windows(batches, 2)
    next(found)
    assert fetched == [0, 1]


def test_batches_of_all_shapes_are_moved() -> None:
    device = torch.device("meta")
    one = torch.ones(2)
    moved = move_batch([one, (one, "name"), {"a": one}, Pair(one, 3), OrderedDict(b=one)], device)
    assert moved[0].device == device
    assert moved[1][1] == "name"
    assert moved[2]["a"].device == device
    assert type(moved[3]) is Pair
    assert type(moved[4]) is OrderedDict


def test_what_is_input_and_what_is_target() -> None:
    assert split_batch([1, 2, 3]) == ((1, 2), {}, 3)
    assert split_batch({"x": 1}) == ((), {"x": 1}, {"x": 1})
    assert network_arguments((1, 2), takes_targets=True) == ((1, 2), {})
    assert network_arguments((1, 2), takes_targets=False) == ((1,), {})
    assert network_arguments("b", takes_targets=True) == (("b",), {})
    for bad in (torch.ones(3), [torch.ones(3)]):
        with pytest.raises(UsageError, match="without targets"):
            split_batch(bad)
    assert batch_size({"a": [torch.ones(5, 2)]}) == 5
    assert batch_size([3, "x"]) == 1


def test_the_running_loss_resumes_bit_for_bit() -> None:
    model = make_model()
    straight, first, second = EpochLoss(model), EpochLoss(model), EpochLoss(model)
    losses = torch.rand(20, generator=torch.Generator().manual_seed(1))

    def add(running: EpochLoss, some: torch.Tensor) -> None:
        for loss in some:
            running.begin_step()
            running.note(loss * 2)
            running.note(loss)  # replaces it

    add(straight, losses)
    add(first, losses[:9])
    second.load_state_dict(first.state_dict())
    add(second, losses[9:])
    assert torch.equal(straight.mean(), second.mean())
    straight.reset()
    assert straight.mean().isnan()
    add(straight, losses[:1])
    assert straight.mean() == losses[0].double()


def test_params_read_as_attributes_and_as_a_dict() -> None:
    params = CallbackParams(cur_step_num=3)
    params.extra = 5
    assert (params.cur_step_num, params["extra"], params.get("none", 7)) == (3, 5, 7)
    with pytest.raises(AttributeError, match="there are cur_step_num, extra"):
        _ = params.other


def test_callbacks_alone_in_a_list_or_not_at_all() -> None:
    one = CallbackList([])
    assert as_callback_list(one) == [one]
    assert as_callback_list(None) == []
    assert as_callback_list((one,)) == [one]
    with pytest.raises(UsageError, match="callbacks=3"):
        as_callback_list(3)  # type: ignore[arg-type]


class Peers:
    """An exchange whose other ranks do, or do not, ask for the stop too."""

    def __init__(self, all_ask: bool) -> None:
        self.all_ask = all_ask
        self.published: list[str] = []

    def publish(self, name: str, value: str) -> None:
        self.published.append(name)

    def collect(self, name: str, timeout_s: float) -> list[str]:
        if not self.all_ask:
            raise TimeoutError
        return ["1", "1"]


class AskedGuard(Unguarded):
    def __init__(self) -> None:
        super().__init__([], rank=0, world_size=2)
        self.asked: list[tuple[str, int]] = []

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        self.asked.append((reason, exit_code))


@pytest.mark.parametrize("all_ask", [True, False])
def test_request_stop_of_some_ranks_becomes_a_stop_of_all(all_ask: bool) -> None:
    model, guard, peers = make_model(), AskedGuard(), Peers(all_ask)
    exchange: Any = peers
    loop = TrainLoop(model, guard, CallbackList([]), [], EpochLoss(model), [], exchange)
    assert not loop._stop_wanted()
    loop.context.request_stop()
    assert loop._stop_wanted() is all_ask
    assert loop._stop_wanted() is all_ask
    assert guard.asked == ([] if all_ask else [("RunContext.request_stop()", 0)])


def test_without_a_guard_some_ranks_cannot_stop_all() -> None:
    with pytest.raises(UsageError, match="on every rank"):
        Unguarded([], rank=0, world_size=2).request_stop("RunContext.request_stop()")


def test_devices() -> None:
    network = make_network()
    assert choose_device("cpu", network, RankInfo()) == torch.device("cpu")
    assert choose_device(None, nn.Linear(1, 1, device="meta"), RankInfo()).type == "meta"
    if not torch.cuda.is_available():
        assert choose_device(None, network, RankInfo()).type == "cpu"
        with pytest.raises(UsageError, match="no CUDA device"):
            choose_device("cuda:1", network, RankInfo())


def test_one_rank_is_not_wrapped() -> None:
    network = make_network()
    assert wrap_network(network, torch.device("cpu"), 1) is network
    assert without_ddp(network) is network
    assert not is_parallel(network)


def test_a_context_remembers_the_request() -> None:
    context = RunContext(CallbackParams())
    assert not context.get_stop_requested()
    context.request_stop()
    assert context.get_stop_requested()
