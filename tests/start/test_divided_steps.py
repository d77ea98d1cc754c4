"""Steps that replicas have divided among their files: whatever is missing, a start has a whole step or an older one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mindx_elastic.core.division import parts_of_member
from mindx_elastic.errors import UsageError
from mindx_elastic.persist.reader import read_checkpoint
from mindx_elastic.start.facts import Refusal, ResumePlan, World
from mindx_elastic.start.findings import Findings, list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory
from tests.start.divided import Replicas

OLD, NEW = 10, 20


def inventory(root: Path) -> Inventory:
    """Through the encoding in which ranks tell each other what they have found."""
    found = scan(list_files([root]), trust=reader_trust(root))
    decoded = Findings.decode(found.encode(), found.strategies)
    decoded.entries = found.entries
    return Inventory.merge([decoded])


def check_reads(plan: ResumePlan, job: Replicas) -> None:
    """Every rank gets the weights of the plan's step, from files of that step alone."""
    wanted = job.state(0)["model"]
    for share in plan.ranks:
        state = read_checkpoint(share.file.path, others=[fact.path for fact in share.others]).state
        assert all(torch.equal(state["model"][name], wanted[name]) for name in wanted)
        assert state["rng"]["own"].tolist() == [share.file.rank] * 3
        assert {fact.moment for fact in (share.file, *share.others)} == {plan.moment}


@given(data=st.data(), size=st.integers(2, 4), copies=st.integers(1, 2))
@settings(deadline=None, max_examples=30)
def test_any_files_of_a_save_are_a_whole_step_or_the_older_one(data: st.DataObject, size: int, copies: int) -> None:
    """Files appear whole or not at all, so that any ranks lost at any moment of a save leave some of its files."""
    ranks = st.sets(st.integers(0, size - 1))
    shares, whole = data.draw(ranks, "shares"), data.draw(st.one_of(st.just(set()), ranks), "whole")
    parts = st.sets(st.integers(0, size - 1), min_size=1)
    covers = data.draw(st.dictionaries(st.integers(0, size - 1), parts, max_size=2), "covers")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        old, new = Replicas(root, size, OLD), Replicas(root, size, NEW)
        for rank in range(size):
            old.write(rank, None, name="job-1_0")
        for rank in shares:
            new.write_share(rank, copies)
        for rank, covered in covers.items():
            new.write(rank, covered, name="job-1_1_breakpoint.cover")
        for rank in whole:
            new.write(rank, None, name="job-1_1")
        there = {part for rank in shares for part in parts_of_member(rank, size, copies)}
        there.update(*covers.values())
        is_complete = bool(whole) or there == set(range(size))
        plan = inventory(root).plan(World(size))
        assert isinstance(plan, ResumePlan)
        has_own = shares | whole | covers.keys()
        lost_small = set(range(size)) - has_own
        # An exact step just before goes before one in which a rank has lost its random numbers; 10 is not just before.
        assert plan.step == (NEW if is_complete else OLD)
        assert plan.exact == (not is_complete or not lost_small)
        event(f"complete: {is_complete}, exact: {plan.exact}")
        check_reads(plan, new if is_complete else old)
        resharded = inventory(root).plan(World(size + 1))
        assert isinstance(resharded, ResumePlan) and resharded.step == plan.step
        check_reads(resharded, new if is_complete else old)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    job = Replicas(tmp_path, 3)
    job.write_share(0, 1)
    job.write_share(2, 1)
    plan = inventory(tmp_path).plan(World(3))
    assert isinstance(plan, Refusal)
    assert "part 2 of 3 is in no usable file (files of ranks 0, 2 are there)" in str(plan)


def test_one_file_of_a_divided_step_is_refused_by_name(tmp_path: Path) -> None:
    path = Replicas(tmp_path, 3).write_share(1, 1)
    with pytest.raises(UsageError, match=r"part 1, 3 is not in it.*mindx-elastic convert"):
        read_checkpoint(path)
