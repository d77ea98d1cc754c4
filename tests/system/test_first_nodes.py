"""The first node is lost, whose agent hosts the workers' store: another one does from then on, and the processes of the
others live on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.test_lost_nodes import STEP_S, check, plain, replace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

HOSTS = r"node (\d+) hosts the workers' store now \(this one\)"


def test_the_first_of_two_nodes_is_replaced_and_its_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = plain(tmp_path, 2, 1)
    nodes, survivors = replace(tmp_path, 2, 1, "0:8:update:node")
    check(nodes, survivors, undisturbed, {0})
    assert [match[1] for match in nodes.found(HOSTS)] == ["1"], nodes.report()


@drill
def test_the_first_of_three_nodes(tmp_path: Path) -> None:
    args = ("--size", 144, *STEP_S)
    nodes, survivors = replace(tmp_path, 3, 1, "0:8:forward:node", *args)
    check(nodes, survivors, plain(tmp_path, 3, 1, *args), {0})
    assert len(nodes.found(HOSTS)) == 1, nodes.report()
