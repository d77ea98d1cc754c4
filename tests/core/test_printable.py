"""Text from others: shown, never obeyed, in every command, in the log, and in exceptions."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.cli.main import main
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.printable import listed, printable, printable_block
from mindx_elastic.errors import MindxError, SaveError, UsageError
from tests.checkpoint_files import flip_bit_in_data, write

# Colour, a link, the title, another line, the line's beginning, a direction mark, C1, rich's markup.
HOSTILE = "x\x1b[31m\x1b]8;;http://e\x1b\\y\x1b]0;t\x07\nFORGED line\r\u202e\x9b2J[red]m[/red]:smile:"
NAME = HOSTILE.replace("/", "")
SHOWN = printable(HOSTILE)


def assert_harmless(text: str) -> None:
    for line in text.splitlines():
        assert line.isprintable(), f"{line!r} in\n{text!r}"
        assert not line.startswith("FORGED"), text
    assert "\r" not in text


@given(st.text())
def test_one_line_that_can_be_printed_and_stays_as_it_is(text: str) -> None:
    found = printable(text)
    assert found.isprintable() and printable(found) == found
    assert not text.isprintable() or found == text
    assert printable_block(text).count("\n") == text.count("\n")


def test_what_is_cut_off_or_cannot_be_decoded_is_said() -> None:
    assert printable("\x1b" * 10**6, 3) == r"\x1b\x1b\x1b... (1000000 characters)"
    assert printable(b"a\xffb".decode("utf-8", "surrogateescape")) == r"a\udcffb"
    assert (listed([1, 2], 2), listed("abcde", 2)) == ("1, 2", "a, b and 3 more")
    assert listed("abcde", 2, "; ") == "a; b; and 3 more"


def test_every_exception_of_ours() -> None:
    assert {str(kind(HOSTILE)) for kind in (MindxError, UsageError, SaveError)} == {SHOWN}


@pytest.fixture
def handler() -> Iterator[io.StringIO]:
    """A handler of the program's own."""
    stream = io.StringIO()
    own = logging.StreamHandler(stream)
    logging.getLogger().addHandler(own)
    yield stream
    logging.getLogger().removeHandler(own)


def test_the_log_also_through_handlers_of_the_program(handler: io.StringIO) -> None:
    logger.warning("file %s: %d", HOSTILE, 3)
    logger.warning(HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("an error")
    text = handler.getvalue()
    assert_harmless("\n".join(line for line in text.split("\n") if not line.startswith("FORGED")))
    assert text.startswith(f"file {SHOWN}: 3\n{SHOWN}\nan error\nTraceback"), text
    assert "\x1b" not in text


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Of two steps the newer one is damaged; whatever can hold a text holds a hostile one."""
    root = tmp_path / "ckpt"
    state = {
        "model": {HOSTILE: torch.arange(1000.0)},
        HOSTILE: {"value": 1, "tensor": torch.ones(2)},
        "optimizer": {"state": {}},
    }
    texts = {
        "reason": HOSTILE,
        "run_id": HOSTILE,
        "append_info": [HOSTILE],
        "coordinates": {"replicas": 1, HOSTILE: 2},
        "torch_version": HOSTILE,
    }
    write(root / f"{NAME}-1_5.safetensors", step=5, state=state, **texts)
    flip_bit_in_data(write(root / f"{NAME}-1_6.safetensors", step=6, state=state, **texts))
    (root / f"{NAME}-1_7.safetensors").write_bytes(b"no checkpoint")
    return root


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object, columns: int = 0) -> str:
        if columns:
            monkeypatch.setenv("COLUMNS", str(columns))
        else:
            monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setattr("sys.argv", ["mindx-elastic", *map(str, words)])
        with pytest.raises(SystemExit):
            main()
        out, err = capsys.readouterr()
        return out + err

    return run


def test_every_command(hostile: Path, command: Callable[..., str], tmp_path: Path) -> None:
    good, bad = hostile / f"{NAME}-1_5.safetensors", hostile / f"{NAME}-1_6.safetensors"
    other = tmp_path / "other"
    for words in (
        ("inspect", hostile),
        ("inspect", hostile, "--json"),
        ("inspect", good),
        ("verify", hostile),
        ("plan", hostile),
        ("plan", hostile, "--target", HOSTILE),
        ("plan", bad),
        ("convert", good, tmp_path / "all.pt", "--all"),
        ("convert", hostile, tmp_path / NAME),
        ("convert", bad, other),
        ("convert", good, tmp_path / "x.pt", "--component", HOSTILE),
        ("inspect", hostile / HOSTILE),
        ("status", hostile / HOSTILE),
    ):
        text = command(*words)
        assert text, words
        assert_harmless(text)
    assert SHOWN in command("inspect", good)


def test_what_a_run_has_recorded(tmp_path: Path, command: Callable[..., str]) -> None:
    log = EventLog(tmp_path / "events.jsonl", run_id=HOSTILE)
    log.emit("agent_start", pid=1, host=HOSTILE, agent_dir=HOSTILE, command=[HOSTILE])
    for number, outcome in enumerate(("failed", HOSTILE)):
        more: dict[str, Any] = {"attempt": number, "pid": 1, "host": HOSTILE, "resumed_path": HOSTILE}
        log.emit("attempt", reason=HOSTILE, outcome=outcome, cause_rank=0, **more)
    log.emit("agent_end", pid=1, host=HOSTILE, outcome=HOSTILE, exit_code=1)
    for columns in (0, 40):
        assert_harmless(command("status", tmp_path, columns=columns))
