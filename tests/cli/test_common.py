from __future__ import annotations

import pytest
import typer

from mindx_elastic.cli.common import human_age, parse_size


def test_ages() -> None:
    ages = {-30: "in future", -0.5: "0 s", 59.6: "60 s", 300: "5 min", 7200: "2 h", 432_000: "5 d"}
    assert {seconds: human_age(seconds) for seconds in ages} == ages


@pytest.mark.parametrize("text", ["", "0B", "-1GiB", "1GB2", "many", "18", "18G", "9999999TiB", "1\u0663GiB"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        parse_size(text)
    assert "--state" in capsys.readouterr().err
