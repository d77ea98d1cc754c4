from __future__ import annotations

from pathlib import Path

import pytest
import torch

import train

# --- the command line ---


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--epochs", "0"),
        ("--epochs", "1.5"),
        ("--lr", "nan"),
        ("--seed", "-1"),
        ("--grad-accum", "0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.parse_args([flag, value])
    assert caught.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag}:" in message
    assert value in message


def test_a_missing_data_directory_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nowhere"
    assert train.main(["--data-url", str(missing), "--train-url", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"train.py: error: data directory {missing} does not exist")
    assert not (tmp_path / "out").exists()


# --- the schedule ---


def test_the_schedule_is_not_part_of_its_own_state() -> None:
    """So a resumed job may be given more epochs: the checkpoint must not bring the old total back."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, train.learning_rate_factor(10))
    assert schedule.state_dict()["lr_lambdas"] == [None]
