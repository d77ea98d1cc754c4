"""Tensors of the program's own objects come back to the devices they were on. The device "meta" stands in for one."""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mindx_elastic.capture import collector as collector_module
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import map_tensors
from mindx_elastic.capture.nested import devices_of, put_on

CPU, META = torch.zeros(2), torch.zeros(2, device="meta")


TREES = st.recursive(
    st.sampled_from([CPU, META, 1]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 5))
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


def kinds(state: Any) -> Any:
    """With devices in the place of tensors."""
    return map_tensors(state, lambda tensor: tensor.device.type)  # type: ignore[arg-type, return-value]


@given(TREES)
def test_each_tensor_goes_where_it_was(state: Any) -> None:
    here = map_tensors(state, lambda _: CPU)
    assert kinds(put_on(here, devices_of(state, None))) == kinds(state)
    assert kinds(put_on(here, "meta")) == kinds(map_tensors(state, lambda _: META))


def test_what_is_noted_and_what_cannot_be_said_stays_in_host_memory() -> None:
    assert devices_of({"a": CPU, "b": (CPU, 1)}, None) == ""
    assert devices_of({"a": META, "b": deque([META, META], 4)}, None) == "meta"
    assert devices_of({"a": META, 7: [CPU, {"b": META}]}, None) == ["meta", "cpu", "meta"]
    state = {"a": CPU}
    assert put_on(state, "") is state and put_on(state, ["meta", "meta"]) is state


def test_the_device_of_the_ranks_weights_has_no_number() -> None:
    own, other = torch.device("meta", 1), torch.device("cuda", 0)
    state = mock.Mock(spec=torch.Tensor, device=own), mock.Mock(spec=torch.Tensor, device=other)
    assert devices_of(state, own) == ["meta", "cuda:0"] and devices_of(state, other) == ["meta:1", "cuda"]
    assert put_on([CPU], "meta", own)[0].device == torch.zeros(1, device=own).device


class Averages:
    """As people write it: the tensors that it is given are its tensors."""

    def __init__(self, device: str) -> None:
        self.shadow = [torch.zeros(2, device=device)]
        self.count = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.count = state["shadow"], state["count"]


class Scaled(nn.Linear):
    """Keeps a tensor that is not a buffer."""

    def __init__(self, device: str) -> None:
        super().__init__(2, 2)
        self.amax = torch.ones(3, device=device)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"amax": self.amax}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.amax = state["amax"]


def test_an_object_and_a_modules_extra_state_are_given_tensors_on_their_devices() -> None:
    targets = {"model": nn.Sequential(Scaled("cpu"), Scaled("meta")), "ema": Averages("meta")}
    with mock.patch.object(collector_module, "are_in_use", return_value=True):
        state = Collector(targets).state()
    assert state["tensor_devices"] == {"model": {"1._extra_state": "meta"}, "ema": ["meta", "cpu"]}
    state["ema"] = {"shadow": [CPU], "count": torch.zeros(())}  # as it is read from a file
    for number in range(2):
        state["model"][f"{number}._extra_state"] = {"amax": torch.ones(3)}
    model, ema = nn.Sequential(Scaled("cpu"), Scaled("cpu")), Averages("cpu")
    Collector({"model": model, "ema": ema}).load(state)
    assert (ema.shadow[0].device.type, ema.count.device.type) == ("meta", "cpu")
    assert [kinds(each.amax) for each in model if isinstance(each, Scaled)] == ["cpu", "meta"]
