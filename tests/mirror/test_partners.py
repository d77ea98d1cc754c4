"""Who keeps whose copies, for any number of nodes and any number of ranks on each."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.mirror.partners import all_partners

nodes_and_copies = st.tuples(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=16), st.integers(1, 6)
)


@given(nodes_and_copies)
def test_a_file_lies_on_as_many_nodes_as_asked_for_or_as_there_are(case: tuple[list[str], int]) -> None:
    nodes, copies = case
    for rank, partners in enumerate(all_partners(nodes, copies)):
        holders = {nodes[other] for other in [rank, *partners]}
        assert len(holders) == len(partners) + 1 == min(copies, len(set(nodes)))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))
def test_equal_nodes_share_the_work_equally(num_nodes: int, per_node: int, copies: int) -> None:
    nodes = [str(rank // per_node) for rank in range(num_nodes * per_node)]
    kept = Counter(partner for partners in all_partners(nodes, copies) for partner in partners)
    assert {kept[rank] for rank in range(len(nodes))} == {min(copies, num_nodes) - 1}
