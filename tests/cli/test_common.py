from __future__ import annotations

import pytest
import typer

from mindx_elastic.cli.common import human_age, human_size, parse_size
from mindx_elastic.core.printable import printable


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert human_size(nbytes) == text


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


def test_untrusted_text_becomes_one_plain_line() -> None:
    assert printable("Größe 模型 [red]") == "Größe 模型 [red]"
    assert printable("a\nb\x1b[31m\x07") == "a\\nb\\x1b[31m\\x07"
    assert printable(b"caf\xe9".decode("utf-8", "surrogateescape")) == "caf\\udce9"


@pytest.mark.parametrize(("text", "size"), [("18GiB", 18 << 30), ("1.5Gi", 3 << 29), ("512 MiB", 1 << 29), ("7B", 7)])
def test_sizes_that_are_given(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0B", "-1GiB", "1GB2", "many", "18", "18G", "9999999TiB", "1\u0663GiB"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        parse_size(text)
    assert "--state" in capsys.readouterr().err
