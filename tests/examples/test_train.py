from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from tests.watchdog import MOST_S, finish

EXAMPLE = Path(train.__file__)
QUICK = ["--epochs", "2", "--batch-size", "16", "--limit-train", "96", "--log-steps", "1"]  # 12 steps, alone


# --- the hash ---


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


# --- the whole script, as a user runs it ---


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, str(EXAMPLE), "--train-url", str(folder), *QUICK, *flags]


def run_to_the_end(environment: dict[str, str], folder: Path, *flags: str) -> dict[str, object]:
    """Run the script; returns the JSON of the last line on its stdout."""
    done = finish(command(folder, *flags), env=environment, fresh=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"event", "step", "epoch", "weights_sha256", "resumed_from_step", "test_accuracy"}
    assert result["event"] == "train_end"
    return result


@pytest.mark.slow
@pytest.mark.drill
def test_stopped_by_signal_and_by_flag_file_and_resumed_with_equal_weights(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    flags = ("--num-workers", "1", "--grad-accum", "2", "--amp", "--epochs", "8")  # 3 updates an epoch
    reference = run_to_the_end(environment, tmp_path / "whole", *flags)
    assert (reference["step"], reference["epoch"], reference["resumed_from_step"]) == (24, 8, None)

    folder = tmp_path / "stopped"
    flag_file = folder / "graceful_exit.json"
    environment |= {"MS_ENABLE_GRACEFUL_EXIT": "1", "MINDX_FLAG_POLL_S": "0.02"}
    for stop_at, code in (("epoch: 2 step: 1,", 143), ("epoch: 3 step: 1,", 75)):
        with subprocess.Popen(
            command(folder, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith(stop_at))
            if code == 143:
                process.send_signal(signal.SIGTERM)
            else:
                flag_file.write_text('{"GracefulExit": 1}')
            _, errors = process.communicate(timeout=MOST_S)
        assert "Graceful exit is triggered, stop training." in errors
        assert process.returncode == code, errors
        flag_file.unlink(missing_ok=True)

    resumed = run_to_the_end(environment, folder, *flags)
    resumed_from = resumed.pop("resumed_from_step")
    assert isinstance(resumed_from, int)
    assert 7 <= resumed_from < 24
    assert resumed == {key: value for key, value in reference.items() if key != "resumed_from_step"}
