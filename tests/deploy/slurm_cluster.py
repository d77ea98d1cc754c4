"""A real Slurm of one node, unpacked from Debian's packages without installing anything."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import wait_until

__all__ = ["SlurmCluster", "start_slurm"]

_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("munge", "libmunge2", "libhwloc15", "liblua5.1-0"),
)
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_CONF = """\
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
PluginDir={root}/{libraries}/slurm-wlm
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=600
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
SchedulerParameters=bf_interval=5,sched_interval=5,preempt_send_user_signal
"""


class SlurmCluster:
    """Commands of the cluster. `env` makes others find it."""

    def __init__(self, base: Path, root: Path) -> None:
        self.base, self.root = base, root
        self.env = {
            **os.environ,
            "SLURM_CONF": str(base / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{root / _LIBRARIES}:{root / _LIBRARIES}/slurm-wlm",
            "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        }

    def run(self, *command: str) -> str:
        """The output of one command."""
        done = subprocess.run(
            command, check=False, env=self.env, cwd=self.base, capture_output=True, text=True, timeout=120.0
        )
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, *options: str) -> str:
        """Give a job to the cluster; its number."""
        return self.run("sbatch", "--parsable", *options)

    def log(self) -> str:
        """All of the controller's log."""
        return (self.base / "slurmctld.log").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in self.base.glob("*.log"))


def _download(folder: Path) -> None:
    """Unpack the packages below `folder`, or skip the test."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("Slurm is unpacked from Debian's packages, by root")
    folder.mkdir()
    done = subprocess.run(
        ["apt-get", "download", *_PACKAGES], check=False, cwd=folder, capture_output=True, text=True, timeout=300.0
    )
    if done.returncode != 0:
        pytest.skip(f"Debian's packages cannot be had: {done.stderr.strip()[-200:]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], check=True)


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_slurm(base: Path) -> tuple[SlurmCluster, list[subprocess.Popen[bytes]]]:
    """Start a cluster with its files below `base`; its daemons, which the caller ends. Skips where it cannot be had."""
    _download(base / "packages")
    root, host = base / "packages" / "root", socket.gethostname().partition(".")[0]
    port, node_port = _free_ports(2)
    for name in ("state", "spool"):
        (base / name).mkdir()
    (base / "slurm.conf").write_text(
        _CONF.format(host=host, root=root, libraries=_LIBRARIES, base=base, port=port, node_port=node_port)
    )
    (base / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    cluster = SlurmCluster(base, root)
    stepd = root / "usr/sbin/slurmstepd-wlm"
    commands = (["slurmctld-wlm", "-D", "-i"], ["slurmd-wlm", "-D", "-d", str(stepd)])
    daemons = [
        subprocess.Popen(
            [str(root / "usr/sbin" / name), *words],
            env=cluster.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, *words in commands
    ]

    def is_up() -> bool:
        assert all(each.poll() is None for each in daemons), cluster.logs()
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], check=False, env=cluster.env, capture_output=True, text=True)
        return "idle" in done.stdout

    wait_until(is_up, "the cluster")
    return cluster, daemons
