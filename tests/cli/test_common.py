from __future__ import annotations

import pytest
import typer

from mindx_elastic.cli.common import human_age, parse_size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.5, "0 s"),
        (-30, "in future"),
        (0, "0 s"),
        (59.6, "60 s"),
        (300, "5 min"),
        (7200, "2 h"),
        (86400 * 5, "5 d"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert human_age(seconds) == text


@pytest.mark.parametrize("text", ["", "0B", "-1GiB", "1GB2", "many", "18", "18G", "9999999TiB", "1\u0663GiB"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        parse_size(text)
    assert "--state" in capsys.readouterr().err
