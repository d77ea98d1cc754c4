"""Environment variables: defaults, values, and refusals that name the variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.config import ClusterSettings, RankInfo, Settings, TftSettings, parse_rehearse
from mindx_elastic.errors import UsageError


def test_places_of_a_rehearsal() -> None:
    known: dict[Any, tuple[object, ...]] = {None: (), "20, 100,epoch": (20, 100, "epoch"), (7, "epoch"): (7, "epoch")}
    assert {value: parse_rehearse(value, "rehearse") for value in known} == known
    for wrong in (0, True, "soon", "20;30"):
        with pytest.raises(UsageError, match=r"^rehearse="):
            parse_rehearse(wrong, "rehearse")


@pytest.mark.parametrize("name", ["MINDX_GRACE_S", "MS_ENABLE_GRACEFUL_EXIT", "MINDX_LOG_LEVEL"])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_value_is_the_default(name: str, text: str) -> None:
    assert Settings.from_env({name: text}) == Settings()


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("", None), (" 1 ", True)])
def test_the_graceful_exit_switch(text: str, value: bool | None) -> None:
    assert Settings.from_env({"MS_ENABLE_GRACEFUL_EXIT": text}).graceful_exit is value


@pytest.mark.parametrize(
    ("env", "named"),
    [
        *((f"MINDX_GRACE_S={text}", "MINDX_GRACE_S") for text in ("soon", "0.4", "nan", "inf")),
        *(("MINDX_AGREEMENT_S=0", "MINDX_AGREEMENT_S"), ("MINDX_FINAL_SAVE=no", "MINDX_FINAL_SAVE")),
        *(
            ("MINDX_UNMANAGED=ignore", "MINDX_UNMANAGED"),
            ("MINDX_ODD=skip", "MINDX_ODD"),
            ("MINDX_FLAG_POLL_S=0.001", "MINDX_FLAG_POLL_S"),
        ),
        *(("MS_ENABLE_GRACEFUL_EXIT=yes", "MS_ENABLE_GRACEFUL_EXIT"), ("MINDX_LOG_LEVEL=LOUD", "MINDX_LOG_LEVEL")),
        *((f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}", "TORCH_ELASTIC_SHUTDOWN") for text in ("1.5", "-1", "soon")),
        *(("RANK=1.5", "RANK"), ("RANK=2 WORLD_SIZE=2", "RANK=2"), ("RANK=-1 WORLD_SIZE=2", "RANK=-1")),
        *(("WORLD_SIZE=0", "WORLD_SIZE=0"), ("TORCHELASTIC_RESTART_COUNT=many", "TORCHELASTIC_RESTART_COUNT")),
        *((f"MS_ENABLE_TFT={text}", "MS_ENABLE_TFT") for text in ("{TTP}", "TTP:yes", "{TTP:1,U_E!:2}")),
    ],
)
def test_a_bad_value_is_refused_by_name(env: str, named: str) -> None:
    values = dict(each.split("=", 1) for each in env.split())
    with pytest.raises(UsageError, match=named):
        _ = [kind.from_env(values) for kind in (Settings, RankInfo, TftSettings)]


def test_the_launcher_s_own_variable_is_the_grace_period_too() -> None:
    """torchrun and our agent kill what is left after so long."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert Settings.from_env({name: "12"}).grace_s == 12
    assert Settings.from_env({name: "12", "MINDX_GRACE_S": "40"}).grace_s == 40
    assert Settings.from_env({name: "0"}).grace_s == 0.5


def test_mpirun_leaves_less_time() -> None:
    ranks = {"OMPI_COMM_WORLD_SIZE": "2"}
    assert Settings.from_env(ranks).grace_s == 1
    assert Settings.from_env({**ranks, "OMPI_MCA_odls_base_sigkill_timeout": "20"}).grace_s == 20
    assert Settings.from_env({**ranks, "PRTE_LAUNCHED": "1"}).grace_s == 30
    assert Settings.from_env({**ranks, "MINDX_GRACE_S": "40"}).grace_s == 40
    assert Settings.from_env({**ranks, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "12"}).grace_s == 12  # torchrun's worker


def test_another_grace_period() -> None:
    for grace_s in (0.5, 86400):
        settings = Settings(agreement_s=2.0).with_grace(grace_s)
        assert (settings.grace_s, settings.agreement_s) == (grace_s, 2.0)
    wrong: tuple[Any, ...] = (0.4, 86401, True, "30", float("nan"))
    for grace_s in wrong:
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
        ("{UCE:1 TTP:1}", {"TTP", "UCE"}),
        ("{ RSC : 0, TTP\t:1 }", {"TTP"}),
    ],
)
def test_the_switch_of_tft(text: str, enabled: set[str]) -> None:
    settings = TftSettings.from_env({"MS_ENABLE_TFT": text, "MINDIO_FOR_MINDSPORE": "1"})
    assert settings.enabled == enabled and settings.ttp == ("TTP" in enabled) and settings.for_mindspore


CLUSTER = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "h", "MS_SCHED_PORT": "8118"}


def test_a_dynamic_cluster() -> None:
    more = {"MS_NODE_ID": "w-1", "MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "r", "MS_NODE_TIMEOUT": "30"}
    found = ClusterSettings.find({"MS_ROLE": "MS_WORKER", **CLUSTER, **more, "MS_TOPO_TIMEOUT": "60", "DEVICE_ID": "3"})
    assert found is not None
    assert (found.node_id, found.recovery, found.recovery_path, found.device) == ("w-1", True, Path("r"), 3)
    assert (found.heartbeat_s, found.formation_s) == (30, 60)
    assert ClusterSettings.from_env({**more, "MINDX_HEARTBEAT_S": "2"}).heartbeat_s == 2
    assert ClusterSettings.find({}) is None and ClusterSettings.find({"MS_WORKER_NUM": "1"}) is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"MS_SCHED_HOST": "", "MS_SCHED_PORT": ""}, "set MS_ROLE, MS_SCHED_HOST, MS_SCHED_PORT"),
        ({"MS_ROLE": "MS_PSERVER"}, "MS_ROLE='MS_PSERVER': give MS_SCHED, MS_WORKER"),
        ({"MS_WORKER_NUM": "0"}, "MS_WORKER_NUM=0 is outside"),
        ({"MS_ROLE": "MS_SCHED", "MS_ENABLE_RECOVERY": "1"}, "set MS_RECOVERY_PATH"),
        *(({name: "x"}, name) for name in ("MS_SCHED_PORT", "MINDX_HEARTBEAT_S", "MS_TOPO_TIMEOUT", "DEVICE_ID")),
    ],
)
def test_a_dynamic_cluster_that_cannot_be_formed(wrong: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ClusterSettings.find({**CLUSTER, **wrong})
