"""The manifests of ``deploy/kubernetes``: what must fit in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mindx_elastic.agent.options import make_parser

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"


@pytest.mark.parametrize(("name", "nodes"), [("job", 1), ("nodes", 2)])
def test_the_numbers_fit_each_other(name: str, nodes: int) -> None:
    *services, job = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    make_parser().parse_args(words[2:])
    options = dict(zip(words[2::2], words[3::2], strict=False))
    assert pod["terminationGracePeriodSeconds"] == int(options["--grace"]) + 15
    assert (spec["parallelism"], spec["completions"], int(options.get("--nnodes", 1))) == (nodes, nodes, nodes)
    rules = spec["podFailurePolicy"]["rules"]
    assert all(r["onExitCodes"]["containerName"] == container["name"] for r in rules if "onExitCodes" in r)
    codes = {r["action"]: r["onExitCodes"]["values"] for r in rules if "onExitCodes" in r}
    assert codes == {"FailJob": [2, 126, 127], "Ignore": [75, 143]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == set(volumes) and not any("subPath" in mount for mount in mounts.values())
    assert mounts["shm"]["mountPath"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "318Gi"}
    for service in services:
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert pod["subdomain"] == service["metadata"]["name"]
        assert options["--rdzv-endpoint"].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")


@pytest.mark.parametrize("name", ["job", "nodes"])
def test_kubernetes_own_schema_accepts_them(name: str) -> None:
    checker: Any = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()):
        checker.validate(document, checker.latest_version(), strict=True)
