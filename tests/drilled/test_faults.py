"""The words of a fault: what there is, what they become, and what is wrong with others."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from mindx_elastic.drill.faults import KINDS, Fault, describe_kinds, parse_fault
from mindx_elastic.errors import UsageError


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill", Fault(kind="kill")),
        ("kill:rank=1,step=7,at=update", Fault(kind="kill", rank=1, step=7, at="update")),
        ("exception: step=3", Fault(kind="exception", step=3, at="forward")),
        ("terminate:guard=1", Fault(kind="terminate", guard=1)),
    ],
)
def test_what_a_text_says(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == fault, "what a table shows can be given again"
    assert Fault(**asdict(fault)) == fault


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kil", "no such fault (did you mean kill?)"),
        ("", "no such fault; mindx-elastic drill --list"),
        ("kill:rank", "'rank' is none of rank=R, step=N, guard=G, at=PLACE"),
        ("kill:at=lunch", "at=lunch: give boundary, forward, update"),
        ("kill:step=0", "step=0: give a whole number from 1"),
        ("kill:rank=-1", "rank=-1: give a whole number from 0"),
    ],
)
def test_a_wrong_text_is_named_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(UsageError) as found:
        parse_fault(text)
    assert said in str(found.value)


def test_every_kind_is_listed_and_can_be_given() -> None:
    listed = dict(describe_kinds())
    assert len(listed) == len(KINDS) and all(listed.values())
    for kind in KINDS.values():
        assert any(name.startswith(f"{kind.name}:") for name in listed)
        assert parse_fault(kind.name).about is kind
        assert parse_fault(kind.name).at in kind.places


def test_the_faults_of_the_page_can_be_given() -> None:
    page = (Path(__file__).parents[2] / "docs" / "prove.md").read_text(encoding="utf-8")
    assert len([parse_fault(text) for text in re.findall(r"--fault ([a-z]\S*)", page)]) >= 3
