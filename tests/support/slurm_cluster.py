"""A real Slurm on this machine: munge, a controller and two nodes, each in its own network namespace."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

from namespaces import NamespaceNodes, can_make_nodes
from runs import environment

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "munged")
_START_S = 30
_CONFIG = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=10
OverTimeLimit=0
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
SchedulerParameters=sched_interval=2,batch_sched_delay=0
"""


def lacks() -> str | None:
    """Return what a Slurm can't be started for here; None where it can."""
    missing = [name for name in _PROGRAMS if _program(name) is None]
    if missing:
        return f"{missing[0]} is not installed: apt-get install slurm-wlm munge"
    return None if can_make_nodes() else "network namespaces need root and iproute2"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class SlurmCluster:
    """Two nodes and a login node, on which the controller runs."""

    def __init__(self, folder: Path, *, cores: int, memory_mib: int) -> None:
        self.folder, self._cores, self._memory_mib = folder, cores, memory_mib
        self.nodes = NamespaceNodes(3)
        self.login = 2
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        self.nodes.__enter__()
        try:
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_daemons(self) -> None:
        for name in ("state", *(f"spool.{self.nodes.name(node)}" for node in (0, 1))):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        lines = [
            _CONFIG.format(
                controller=self.nodes.name(self.login),
                address=self.nodes.address(self.login),
                folder=self.folder,
            )
        ]
        for node in (0, 1):
            lines.append(
                f"NodeName={self.nodes.name(node)} NodeAddr={self.nodes.address(node)} CPUs={self._cores} "
                f"RealMemory={self._memory_mib} TmpDisk=1000 State=UNKNOWN\n"
            )
        # `ip netns exec` mounts /sys anew, without cgroups; nothing of Slurm here needs them
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = ",".join(self.nodes.name(node) for node in (0, 1))
        lines.append(f"PartitionName=ci Nodes={names} Default=YES MaxTime=60 State=UP\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        munged = (
            "--foreground --force --key-file=munge.key --socket=munge.socket --pid-file=munge.pid "
            "--log-file=munge.log --seed-file=munge.seed"
        )
        words = [word.replace("=munge", f"={self.folder}/munge") for word in munged.split()]
        self._start(self.login, "munged", *words)
        _wait_until(lambda: (self.folder / "munge.socket").exists())
        self._start(self.login, "slurmctld", "-D", "-i")
        for node in (0, 1):
            self._start(node, "slurmd", "-D", "-N", self.nodes.name(node))
        _wait_until(lambda: self.run("sinfo", "--noheader", "--format=%D %t").stdout.split() == ["2", "idle"])

    def __exit__(self, *_: object) -> None:
        self.nodes.__exit__()
        for daemon in self._daemons:
            daemon.wait()

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment that a client of this Slurm needs."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _start(self, node: int, program: str, *arguments: str) -> None:
        command = [_program(program) or program, *arguments]
        output = self.folder / f"{program}.{node}.log"
        self._daemons.append(self.nodes.start(node, command, self.folder, output, **self.variables))

    def run(
        self, *command: str, folder: Path | None = None, timeout_s: float = 120, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node to its end."""
        return subprocess.run(
            ("ip", "netns", "exec", self.nodes.name(self.login), *command),
            cwd=folder or self.folder,
            env=environment(**self.variables, **more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def state(self, job_id: str) -> str:
        """Return a job's state."""
        return self.run(
            "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job_id}"
        ).stdout.strip()

    def wait_for(self, job_id: str, *states: str, within_s: float) -> str:
        """Wait until a job is in one of some states, and return it."""
        _wait_until(lambda: self.state(job_id) in states, within_s=within_s)
        return self.state(job_id)


def _wait_until(is_done: object, *, within_s: float = _START_S) -> None:
    until = time.monotonic() + within_s
    while not is_done():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.2)
