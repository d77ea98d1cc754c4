"""Environment variables: defaults, values, and refusals that name the variable."""

from __future__ import annotations

from typing import Any

import pytest

from mindx_elastic.config import RankInfo, Settings, TftSettings, parse_rehearse
from mindx_elastic.errors import UsageError


@pytest.mark.parametrize(
    ("value", "places"),
    [
        (None, ()),
        ("20, 100,epoch", (20, 100, "epoch")),
        ([7, "epoch"], (7, "epoch")),
    ],
)
def test_places_of_a_rehearsal(value: object, places: tuple[object, ...]) -> None:
    assert parse_rehearse(value, "rehearse") == places


@pytest.mark.parametrize(
    "value",
    [
        0,
        True,
        "soon",
        "20;30",
    ],
)
def test_no_place_of_a_rehearsal(value: object) -> None:
    with pytest.raises(UsageError, match=r"^rehearse="):
        parse_rehearse(value, "rehearse")


@pytest.mark.parametrize("name", ["MINDX_GRACE_S", "MS_ENABLE_GRACEFUL_EXIT", "MINDX_LOG_LEVEL"])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_value_is_the_default(name: str, text: str) -> None:
    assert Settings.from_env({name: text}) == Settings()


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("", None), (" 1 ", True)])
def test_the_graceful_exit_switch(text: str, value: bool | None) -> None:
    assert Settings.from_env({"MS_ENABLE_GRACEFUL_EXIT": text}).graceful_exit is value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MINDX_GRACE_S", "soon"),
        ("MINDX_GRACE_S", "0.4"),
        ("MINDX_GRACE_S", "nan"),
        ("MINDX_GRACE_S", "inf"),
        ("MINDX_AGREEMENT_S", "0"),
        ("MINDX_FINAL_SAVE", "no"),
        ("MINDX_UNMANAGED", "ignore"),
        ("MINDX_FLAG_POLL_S", "0.001"),
        ("MS_ENABLE_GRACEFUL_EXIT", "yes"),
        ("MINDX_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        Settings.from_env({name: text})


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "1.5"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"TORCHELASTIC_RESTART_COUNT": "many"}, "TORCHELASTIC_RESTART_COUNT"),
    ],
)
def test_impossible_ranks_are_refused(env: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        RankInfo.from_env(env)


def test_the_launcher_s_own_variable_is_the_grace_period_too() -> None:
    """torchrun and our agent kill what is left after so long."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert Settings.from_env({name: "12"}).grace_s == 12
    assert Settings.from_env({name: "12", "MINDX_GRACE_S": "40"}).grace_s == 40
    assert Settings.from_env({name: "0"}).grace_s == 0.5
    for wrong in ("1.5", "-1", "soon"):
        with pytest.raises(UsageError, match=name):
            Settings.from_env({name: wrong})


def test_mpirun_leaves_less_time() -> None:
    ranks = {"OMPI_COMM_WORLD_SIZE": "2"}
    assert Settings.from_env(ranks).grace_s == 1
    assert Settings.from_env({**ranks, "OMPI_MCA_odls_base_sigkill_timeout": "20"}).grace_s == 20
    assert Settings.from_env({**ranks, "PRTE_LAUNCHED": "1"}).grace_s == 30
    assert Settings.from_env({**ranks, "MINDX_GRACE_S": "40"}).grace_s == 40
    assert Settings.from_env({**ranks, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "12"}).grace_s == 12  # torchrun's worker


@pytest.mark.parametrize(
    "grace_s",
    [
        0.5,
        86400,
    ],
)
def test_another_grace_period(grace_s: float) -> None:
    settings = Settings(agreement_s=2.0).with_grace(grace_s)
    assert (settings.grace_s, settings.agreement_s) == (grace_s, 2.0)


@pytest.mark.parametrize(
    "grace_s",
    [
        0.4,
        86401,
        True,
        "30",
        float("nan"),
    ],
)
def test_a_grace_period_of_the_wrong_kind_is_refused(grace_s: Any) -> None:
    with pytest.raises(UsageError, match="grace_s="):
        Settings().with_grace(grace_s)


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("{TTP:1}", {"TTP"}),
        ("{TTP:1,UCE:1,ARF:0}", {"TTP", "UCE"}),
        (" '{ttp: 1, NEW:true}' ", {"TTP", "NEW"}),
        ('{"TTP": 1}', {"TTP"}),
        ("TTP=1;TRE=1", {"TTP", "TRE"}),
    ],
)
def test_the_switch_of_tft(text: str, enabled: set[str]) -> None:
    settings = TftSettings.from_env({"MS_ENABLE_TFT": text, "MINDIO_FOR_MINDSPORE": "1"})
    assert settings.enabled == enabled and settings.ttp == ("TTP" in enabled) and settings.for_mindspore


@pytest.mark.parametrize(
    "text",
    [
        "{TTP}",
        "TTP:yes",
        "{TTP:1,U CE:2}",
    ],
)
def test_a_bad_switch_of_tft_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="MS_ENABLE_TFT"):
        TftSettings.from_env({"MS_ENABLE_TFT": text})
