from __future__ import annotations

from typing import Any

import pytest

from mindx_elastic.errors import UsageError
from mindx_elastic.train import CheckpointConfig


def test_the_documented_call_works() -> None:
    config = CheckpointConfig(
        save_checkpoint_steps=32,
        keep_checkpoint_max=35,
        append_info=[{"epoch_num": 3}],
        exception_save=True,
        async_save=True,
    )
    assert (config.steps, config.seconds, config.keep_max, config.keep_per_n_minutes) == (32, 0.0, 35, None)
    assert config.header_info == ({"epoch_num": 3},)


def test_positions_mean_what_they_mean_in_version_0_1() -> None:
    """Options that came later stand behind ``map_param_inc``."""
    config = CheckpointConfig(1, 0, 5, 0, True, False, None, None, None, "AES-GCM", False, True, True, True)
    assert config == CheckpointConfig(crc_check=True, remove_redundancy=True, map_param_inc=True)
    assert config.final_save


def test_steps_go_before_seconds_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = CheckpointConfig(save_checkpoint_steps=10, save_checkpoint_seconds=30)
    assert (config.steps, config.seconds) == (10, 0.0)
    assert "save_checkpoint_seconds=30 is not used" in caplog.text


@pytest.mark.parametrize(
    ("keep_max", "minutes", "expected"),
    [(5, 10, (5, None)), (0, 10, (None, 10)), (None, None, (1, None)), (0, 0, (1, None)), (3, 0, (3, None))],
)
def test_keep_max_goes_before_minutes(keep_max: int | None, minutes: int | None, expected: Any) -> None:
    config = CheckpointConfig(keep_checkpoint_max=keep_max, keep_checkpoint_per_n_minutes=minutes)
    assert (config.keep_max, config.keep_per_n_minutes) == expected


def test_everything_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot all be 0"):
        CheckpointConfig(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("saved_network", "net"),
        ("enc_key", b"0123456789abcdef"),
        ("enc_mode", "ROT13"),
        ("append_info", {"epoch_num": 1}),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        CheckpointConfig(**{name: value})
