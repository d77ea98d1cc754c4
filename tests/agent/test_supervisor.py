"""What the agent shows of what others have said."""

from __future__ import annotations

import pytest

from mindx_elastic.agent.ledger import print_block


def test_what_others_have_said_is_shown_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_block("first line\nsecond \x1b[2J\rline")
    assert capsys.readouterr().err == "first line\nsecond \\x1b[2J\\rline\n"
