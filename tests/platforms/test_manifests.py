"""Manifests: what must fit in them, and what the platforms' own checkers say."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.manifests import JobNumbers, manifest, parse_size, shared_memory_bytes

ROOT = Path(__file__).parents[2]


def numbers(**more: Any) -> JobNumbers:
    given: dict[str, Any] = {"name": "train", "image": "example/train:1", "command": ("train.py", "/checkpoints")}
    return JobNumbers(**{**given, "nproc": 8, "gpus": 8, "faults": "faults", "state_bytes": 18 << 30, **more})


def documents(kind: str, **more: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest(kind, numbers(**more))))


def job_spec(kind: str, **more: Any) -> Any:
    """The batch/v1 Job inside."""
    found = documents(kind, **more)
    if kind == "kubernetes":
        return found[-1]["spec"]
    jobset = found[0]["spec"] if kind == "jobset" else found[0]["spec"]["template"]["spec"]
    return jobset["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["kubernetes", "jobset", "trainer"])
def test_the_numbers_fit_each_other(kind: str, nodes: int) -> None:
    spec = job_spec(kind, nodes=nodes, grace_s=100)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    by_action: dict[str, list[int]] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == container["name"]
            by_action[rule["action"]] = rule["onExitCodes"]["values"]
        else:
            assert rule["action"] == "Ignore" and rule["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert by_action == {"FailJob": [2, 126, 127], "Ignore": [75, 143]}
    words = container["command"]
    assert words[words.index("--grace") + 1] == "100" and pod["terminationGracePeriodSeconds"] == 115
    assert (spec["parallelism"], spec["completions"]) == (nodes, nodes)
    assert (spec.get("completionMode") == "Indexed") is (nodes > 1)
    assert ("--rdzv-endpoint" in words) is (nodes > 1 and kind != "trainer")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "318Gi"}
    assert mounts == {"shm": "/dev/shm", "checkpoints": "/checkpoints", "faults": "/user/restore/fault/config"}
    assert set(mounts) == set(volumes) and not any("subPath" in mount for mount in container["volumeMounts"])
    assert pod["restartPolicy"] == "Never" and spec["podReplacementPolicy"] == "Failed"


def test_pods_of_several_nodes_find_the_first_one() -> None:
    service, job = documents("kubernetes", nodes=2)
    assert service["kind"] == "Service" and service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert "train-0.train:29400" in job["spec"]["template"]["spec"]["containers"][0]["command"]
    (jobset,) = documents("jobset", nodes=2)
    assert "train-node-0-0.train:29400" in yaml.safe_dump(jobset)


def test_shared_memory_has_room_for_two_snapshots() -> None:
    found = numbers(nproc=1, state_bytes=1 << 30)
    assert 2 * (1 << 30) < shared_memory_bytes(found) <= 4 * (1 << 30)


@pytest.mark.parametrize(("text", "size"), [("18GiB", 18 << 30), ("1.5Gi", 3 << 29), ("512 MiB", 1 << 29), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "1GB2", "many", "18G", "9999999TiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--state"):
        parse_size(text)


@pytest.mark.parametrize(
    "more", [{"name": "Train"}, {"name": "a" * 50}, {"command": ()}, {"mount": "x"}, {"claim": "a: b"}]
)
def test_what_cannot_be_a_job_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        numbers(**more)


def test_the_batch_script_is_the_one_of_the_repository() -> None:
    ours = (ROOT / "mindx_elastic" / "platforms" / "slurm_agent.sbatch").read_bytes()
    assert ours == (ROOT / "deploy" / "slurm" / "agent.sbatch").read_bytes()


def test_a_batch_script_has_the_numbers(tmp_path: Path) -> None:
    text = manifest("slurm", numbers(grace_s=100, command=("train.py", "a b", "$(boom)"), name="big"))
    for line in ("#SBATCH --job-name=big", "#SBATCH --gpus=8", "#SBATCH --signal=B:TERM@115"):
        assert line in text.splitlines()
    assert '--nproc-per-node "${NPROC:-8}"' in text and '--grace "${GRACE:-100}"' in text
    assert """train.py 'a b' '$(boom)' "$@" &""" in text
    (tmp_path / "s").write_text(text)
    assert subprocess.run(["bash", "-n", str(tmp_path / "s")], check=False).returncode == 0
    with pytest.raises(UsageError, match="one node"):
        manifest("slurm", numbers(nodes=2))


@pytest.mark.parametrize("nodes", [1, 2])
def test_kubernetes_own_schema_accepts_the_job(nodes: int) -> None:
    checker: Any = pytest.importorskip("kubernetes_validate")
    for document in documents("kubernetes", nodes=nodes):
        checker.validate(document, checker.latest_version(), strict=True)
    for kind in ("jobset", "trainer"):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_spec(kind, nodes=nodes)}
        checker.validate(job, checker.latest_version(), strict=True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_trainer_s_own_models_keep_every_field(nodes: int) -> None:
    """The models drop what they do not know, so what they give back must be what they got."""
    models: Any = pytest.importorskip("kubeflow_trainer_api.models")
    (jobset,) = documents("jobset", nodes=nodes)
    runtime, job = documents("trainer", nodes=nodes)
    for model, document in (
        (models.JobsetV1alpha2JobSet, jobset),
        (models.TrainerV1alpha1TrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, job),
    ):
        assert model.from_dict(document).to_dict() == document
