"""A process that forks, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mindx_elastic.prove.processes import Zygote
from tests.prove.started import environment


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    made = Zygote(environment(), tmp_path_factory.mktemp("zygote") / "log")
    assert made.problem() == ""
    yield made
    made.close()
