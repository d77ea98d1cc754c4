"""A process that forks, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mindx_elastic.agent.zygote import Zygote
from tests.prove.started import environment, forking


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with forking(environment()) as made:
        yield made
