"""A tensor's memory is read without a mark on it."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mindx_elastic.core.tensor_memory import memory_of, without_collections
from mindx_elastic.persist.packer import SectionPacker
from mindx_elastic.prove.digests import digest

PACKAGE = Path(__file__).parents[2] / "mindx_elastic"
OWN = {
    *("persist/flatten.py", "persist/direct_io.py", "persist/packer.py", "persist/reader.py"),
    *("capture/rng.py", "capture/extra_state.py", "core/mersenne.py"),  # states of generators
    *("guard/checks/movements.py", "prove/digests.py", "capture/given_settings.py"),
    *("rejoin/copies.py", "mirror/wire.py"),
}
"""Files that call `Tensor.numpy()` on tensors of our own only."""


def test_the_bytes_are_those_of_the_tensor_live_and_kept() -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    view = memory_of(tensor)
    assert bytes(view) == tensor.numpy().tobytes()
    view[4:8] = (9).to_bytes(4, "little")
    assert tensor[1] == 9
    views = [memory_of(torch.full((5000,), n, dtype=torch.uint8)) for n in range(50)]
    gc.collect()
    assert [bytes(view) for view in views] == [bytes([n]) * 5000 for n in range(50)]
    assert len(memory_of(torch.empty(0, 3))) == 0
    with pytest.raises(RuntimeError):
        memory_of(torch.empty(3, device="meta"))


def test_a_tensor_that_was_looked_at_can_still_be_resized() -> None:
    looks: list[Callable[[torch.Tensor], object]] = [
        digest,
        lambda tensor: [bytes(piece) for piece in SectionPacker("a").pack({1: tensor})],
    ]
    for look in looks:
        tensor = torch.arange(8.0)
        look(tensor)
        tensor.untyped_storage().resize_(4)  # as FSDP does
        torch.ones(100_000, out=torch.empty(0).set_(tensor.untyped_storage()))


def test_no_other_file_asks_for_numpy() -> None:
    found = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(r"\.numpy\(", path.read_text())
    }
    assert found - OWN == {"core/tensor_memory.py"}, "use core.tensor_memory.memory_of for tensors of the program"


def test_the_search_for_garbage_is_paused_here_alone_and_goes_on_as_before() -> None:
    """A loader may fork its workers meanwhile, as that of torchdata does when it is asked for its state."""
    with suppress(KeyError), without_collections(), without_collections():
        assert not gc.isenabled()
        if not (child := os.fork()):
            os._exit(gc.isenabled())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
