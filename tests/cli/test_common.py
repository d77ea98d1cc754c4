from __future__ import annotations

import pytest
import typer

from mindx_elastic.cli.common import parse_size


@pytest.mark.parametrize("text", ["", "0B", "-1GiB", "1GB2", "many", "18", "18G", "9999999TiB", "1\u0663GiB"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        parse_size(text)
    assert "--state" in capsys.readouterr().err
