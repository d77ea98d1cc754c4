"""Manifests: what must fit in them, and what the platforms' own checkers say."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.manifests import JobNumbers, manifest

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


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_of_volcano(nodes: int) -> None:
    """As its controller reads it: of an event's policies the first one counts, a pod's name is JOB-TASK-INDEX, and the
    plugin svc gives it the job's name as its domain."""
    (job,) = documents("volcano", nodes=nodes, grace_s=100, restarts=5)
    assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    spec = job["spec"]
    assert (spec["minAvailable"], spec["maxRetry"], spec["schedulerName"]) == (nodes, 5, "volcano")
    found = [(policy.get("exitCode", policy.get("event")), policy["action"]) for policy in spec["policies"]]
    assert found[:3] == [(2, "TerminateJob"), (126, "TerminateJob"), (127, "TerminateJob")]
    assert found[3:] == [("PodFailed", "RestartJob"), ("PodEvicted", "RestartJob")]
    (task,) = spec["tasks"]
    pod = task["template"]["spec"]
    words = pod["containers"][0]["command"]
    assert (task["name"], task["replicas"]) == ("node", nodes)
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 115
    if nodes > 1:
        assert "train-node-0.train:29400" in words and "/checkpoints/run-$(VC_TASK_INDEX)" in words
        assert set(spec["plugins"]) == {"env", "svc"}
    else:
        assert "plugins" not in spec and "/checkpoints/run" in words
    with pytest.raises(UsageError, match="--restarts 0"):
        manifest("volcano", numbers(restarts=0))


def test_pods_of_several_nodes_find_the_first_one() -> None:
    service, job = documents("kubernetes", nodes=2)
    assert service["kind"] == "Service" and service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert "train-0.train:29400" in job["spec"]["template"]["spec"]["containers"][0]["command"]
    (jobset,) = documents("jobset", nodes=2)
    assert "train-node-0-0.train:29400" in yaml.safe_dump(jobset)


@pytest.mark.parametrize(
    "more",
    [
        *({"name": "Train"}, {"name": "a" * 50}, {"name": "train\n"}, {"command": ()}, {"command": ("a\0b",)}),
        *({"mount": "x"}, {"mount": "/a:b"}, {"claim": "a: b"}, {"claim": "a" * 254}, {"claim": "a..b"}),
        *({"image": ""}, {"image": "train: latest"}),
    ],
)
def test_what_cannot_be_a_job_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        numbers(**more)


WORDS: tuple[str, ...] = (
    "1e-4",
    "1e3",
    "0o17",
    "0x1F",
    "1_000",
    "1:30:00",
    ".5",
    "-.inf",
    "~",
    "null",
    "y",
    "n",
    "On",
    "no",
    "=",
    "<<",
)
WORDS += ("2024-01-01", "", " a  b ", "a: b", "#x", "- x", "{a}", "*x", "&x", "!x", "%x", "@x", "`x`", "'", '"', "\\")
WORDS += ("a\nb", "\t", "\x1b[0m", "\x85", "\u2028", "grün", "\U0001f600", "a" * 300, "a b " * 90, "x:", ":x", "a:b")


@pytest.mark.parametrize("kind", ["kubernetes", "jobset", "trainer"])
def test_words_of_the_program_are_texts_to_every_yaml_reader(kind: str) -> None:
    """kubectl's reader takes ``1e-4`` for a number and ``y`` for true, PyYAML's does not: what is quoted is a text to
    both."""
    text = manifest(kind, numbers(command=("train.py", *WORDS)))
    found = [list(yaml.load_all(text, loader)) for loader in (yaml.SafeLoader, yaml.BaseLoader)]
    for documents_ in found:
        template = documents_[-1]["spec"]
        if kind == "trainer":
            command = template["trainer"]["command"]
        else:
            template = template["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else template
            command = template["template"]["spec"]["containers"][0]["command"]
        assert command[-len(WORDS) :] == list(WORDS)
    plain = [t for t in yaml.scan(text) if isinstance(t, yaml.ScalarToken) and t.plain]
    assert not {"1e-4", "1e3", "0o17", "y", "n"} & {token.value for token in plain}


def test_kubernetes_puts_nothing_in_place_of_a_word() -> None:
    """It would put a variable of the container in place of ``$(NAME)``, and ``$`` in place of ``$$``."""
    words = job_spec("kubernetes", command=("train.py", "$(PYTHONUNBUFFERED)", "5$", "$$"), nodes=2)
    command = words["template"]["spec"]["containers"][0]["command"]
    assert command[-3:] == ["$$(PYTHONUNBUFFERED)", "5$$", "$$$$"]
    assert "/checkpoints/run-$(JOB_COMPLETION_INDEX)" in command, "this one is meant"


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
    with pytest.raises(UsageError, match="--grace 86400"):
        manifest("slurm", numbers(grace_s=86400))
    for word in ('"$@" &\n', "and 60 s before the end", "#SBATCH --job-name=train\n"):  # pieces of the script itself
        script = manifest("slurm", numbers(command=("train.py", word)))
        assert script.count("#SBATCH --signal=B:TERM@60") == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_kubernetes_own_schema_accepts_the_job(nodes: int) -> None:
    checker: Any = pytest.importorskip("kubernetes_validate")
    for document in documents("kubernetes", nodes=nodes):
        checker.validate(document, checker.latest_version(), strict=True)
    for kind in ("jobset", "trainer"):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_spec(kind, nodes=nodes)}
        checker.validate(job, checker.latest_version(), strict=True)
    template = documents("volcano", nodes=nodes)[0]["spec"]["tasks"][0]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
    checker.validate(pod, checker.latest_version(), strict=True)


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
