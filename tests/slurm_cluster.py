"""A real Slurm on one machine: a controller and two nodes, each a network namespace with a name of its own.

Debian's slurmctld, slurmd and slurm-client, as root; without authentication, without limits on processes.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

NET, BRIDGE, NODES = "10.78.0", "plslurm", ("n1", "n2")
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}({net}.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
KillWait=10
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
GresTypes=gpu
NodeName=n1 NodeAddr={net}.11 CPUs=4 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeAddr={net}.12 CPUs=4 RealMemory=4000 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Unavailable(Exception):
    """This machine cannot have it."""


@dataclass(frozen=True)
class Cluster:
    """The running cluster; `folder` has its configuration and logs."""

    folder: Path

    def run(self, *command: str, check: bool = True) -> str:
        """Returns what a command of Slurm prints."""
        done = subprocess.run(
            command, env=self.environment(), cwd=self.folder, capture_output=True, text=True, check=False, timeout=60
        )
        assert not (check and done.returncode), f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, script: str, *options: str) -> str:
        """Returns the id of the job."""
        path = self.folder / "job.sh"
        path.write_text(script)
        jobs: list[str] = []

        def is_taken() -> bool:  # a controller that has just started answers some messages wrongly
            with contextlib.suppress(AssertionError):
                jobs.append(self.run("sbatch", "--parsable", *options, str(path)).partition(";")[0])
            return bool(jobs)

        wait_for(is_taken, f"{path} is a job")
        return jobs[0]

    def state(self, job: str) -> str:
        """Returns PENDING, RUNNING, COMPLETING, COMPLETED ..."""
        return self.run("scontrol", "--oneliner", "show", "job", job).partition("JobState=")[2].split()[0]

    def start_again(self, job: str) -> None:
        """Waits until the job is in the queue again, and spares it Slurm's delay of two minutes."""
        wait_for(lambda: self.state(job) == "PENDING", f"job {job} is queued again")
        time.sleep(2.0)  # a node refuses a job that starts in the second in which it was killed
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def said(self, job: str) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob(f"*-{job}.out"))

    def lose(self, node: str) -> None:
        """Kills everything on a node, and tells the controller."""
        for pid in subprocess.run(
            ["ip", "netns", "pids", f"pl-{node}"], capture_output=True, text=True, check=True
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def start_node(self, node: str) -> None:
        script = f"hostname {node}; mount --bind {self.folder}/hosts /etc/hosts; exec slurmd -N {node}"
        inside = ["nsenter", f"--net=/run/netns/pl-{node}", "unshare", "--uts", "--mount", "sh", "-c", script]
        subprocess.run(inside, env=self.environment(), check=True, capture_output=True)

    def wait_until_idle(self) -> None:
        wait_for(lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%D %t") == "2 idle", "both nodes are idle")


def wait_for(condition: Callable[[], object], what: str, seconds: float = 280.0) -> None:
    """Returns when the condition holds; fails if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Yields a cluster, and removes it. Raises Unavailable."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "ip", "nsenter"))):
        raise Unavailable("a cluster takes root, slurmctld, slurmd, slurm-client and iproute2")
    with filelock.FileLock("/tmp/paceline-test-slurm.lock", timeout=150):  # its names are fixed: one a machine
        yield from _cluster(folder)


def _cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    (folder / "state").mkdir()
    host = socket.gethostname()
    devices = [folder / f"gpu{i}" for i in range(2)]  # character devices that nobody opens
    try:
        for i, device in enumerate(devices):
            os.mknod(device, 0o20600, os.makedev(195, 240 + i))
    except OSError as error:
        raise Unavailable(f"this machine makes no devices: {error}") from None
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    names = "".join(f"{NET}.1{i} {node}\n" for i, node in enumerate(NODES, start=1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{NET}.1 {host}\n{names}")
    (folder / "slurm.conf").write_text(_CONFIG.format(host=host, net=NET, folder=folder))
    try:
        try:
            _sh(f"ip link add {BRIDGE} type bridge; ip addr add {NET}.1/24 dev {BRIDGE}; ip link set {BRIDGE} up")
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"this machine makes no bridges: {error.stderr.strip()}") from None
        subprocess.run(["slurmctld", "-i"], env=made.environment(), check=True, capture_output=True)
        for i, node in enumerate(NODES, start=1):
            ns = f"pl-{node}"
            _sh(
                f"ip netns add {ns}; ip link add to-{ns} type veth peer name eth0 netns {ns}; "
                f"ip link set to-{ns} master {BRIDGE} up; ip -n {ns} link set lo up; "
                f"ip -n {ns} addr add {NET}.1{i}/24 dev eth0; ip -n {ns} link set eth0 up"
            )
            made.start_node(node)
        made.wait_until_idle()
        yield made
    finally:
        for node in NODES:
            subprocess.run(f"ip netns pids pl-{node} | xargs -r kill -9", shell=True, check=False)
            subprocess.run(["ip", "netns", "del", f"pl-{node}"], capture_output=True, check=False)
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "slurmctld.pid").read_text()), 9)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def _sh(script: str) -> None:
    subprocess.run(["sh", "-e", "-c", script], check=True, capture_output=True, text=True)
