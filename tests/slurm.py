"""A real Slurm on the loopback: munged, slurmctld, and two slurmds that are two nodes of this one machine.

It runs as root, the only user who can start it without installing anything, with configuration, keys and state in one
folder. Its programs find it by SLURM_CONF alone. Ended by the pids of what was started, never by name.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ports import kept_port

NODES = ("node1", "node2")
GPUS = 4
"""Of each node; they are links to a device, which no program opens."""
START_S = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
DATABASE = ("mariadbd", "slurmdbd", "sacctmgr")

MEMORY = Path("/sys/fs/cgroup/memory")
"""Where Slurm makes a cgroup for each job whose memory is limited."""
CONSTRAINED = {"task/none": "task/cgroup", "=CR_CPU": "=CR_CPU_Memory", "RealMemory=1000": "RealMemory=16000"}

CONFIG = """ClusterName=toy
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=30
MinJobAge=300
BatchStartTimeout=1
InactiveLimit=0
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=64 RealMemory=1000 Gres=gpu:{gpus}
NodeName={nodes} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports}
PartitionName=gpu Nodes={nodes} Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=1 OverSubscribe=NO
PartitionName=urgent Nodes={nodes} MaxTime=1:00:00 State=UP PriorityTier=9 PreemptMode=OFF
PartitionName=down Nodes={nodes} State=DOWN
"""

ACCOUNTING = """slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations"""
SLURMDBD = """AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageLoc=slurm
StorageUser=root
"""
MARIADB = """--no-defaults --user=root --skip-grant-tables --innodb-buffer-pool-size=16M --init-file={folder}/sql.init
--datadir={folder}/sql --socket={folder}/sql.socket --pid-file={folder}/sql.pid --bind-address=127.0.0.1 --port={sql}"""
TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
"""MariaDB's own tables, of which slurmdbd needs that of procedures."""


@dataclass
class Slurm:
    """A running cluster; `env` is what its programs need beside PATH."""

    folder: Path
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def tell(self, *argv: str) -> str:
        """Run one of Slurm's programs, and return what it printed; the error notes what it said."""
        env = {**os.environ, **self.env}
        try:
            return subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60).stdout
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise

    def start(self, name: str) -> None:
        """Start slurmctld, slurmdbd, or the slurmd of a node by the node's name; again, where it was ended before."""
        argv = ["slurmd", "-D", "-N", name] if name in NODES else [name, "-D"]
        with (self.folder / f"{name}.out").open("ab") as out:
            env = {**os.environ, **self.env}
            self.children[name] = subprocess.Popen(
                [found(argv[0]), *argv[1:]], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End slurmctld or a node's slurmd; the jobs on the node go on."""
        self.children[name].send_signal(number)
        self.children.pop(name).wait()

    def wait_up(self) -> None:
        """Wait until all nodes take jobs; resume those that slurmctld drained: killed, it forgets that a job ended."""
        deadline = time.monotonic() + START_S
        seen = ""
        while time.monotonic() < deadline and not any(child.poll() for child in self.children.values()):
            with suppress(subprocess.CalledProcessError):
                seen = self.tell("sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%t")
                if seen.split() == ["idle"] * len(NODES):
                    return
                if re.search("drain|drng|down", seen):
                    self.tell("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume")
            time.sleep(0.05)
        raise AssertionError(f"Slurm did not start: {seen}\n{self.logs()}")

    def logs(self) -> str:
        texts = (path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.[lo][ou][gt]")))
        return "\n".join(texts)


@contextmanager
def slurm(folder: Path, *, constrained: bool = False, accounting: bool = False) -> Iterator[Slurm]:
    """Run a cluster until the block ends, and end all its jobs then.

    Its jobs are `constrained` to the memory that they ask for. With `accounting` a database keeps jobs and accounts.
    """
    lacking = [name for name in PROGRAMS + accounting * DATABASE if not Path(found(name)).exists()]
    if lacking or os.getuid() != 0:
        pytest.skip(f"no Slurm can be started here, it needs root and {' '.join(lacking)}: apt-get install slurm-wlm")
    if constrained and not os.access(MEMORY / "cgroup.procs", os.W_OK):
        pytest.skip("this machine has no memory cgroups of version 1")
    for part in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / part).mkdir(parents=True)
    folder.chmod(0o711)
    probes, (ctld, dbd, sql, *ports) = zip(*(kept_port() for _ in range(3 + len(NODES))), strict=True)
    text = CONFIG.format(folder=folder, ctld=ctld, gpus=GPUS, nodes=",".join(NODES), ports=",".join(map(str, ports)))
    for name, other in CONSTRAINED.items() if constrained else ():
        text = text.replace(name, other)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nMinRAMSpace=1\n")
    for number in range(GPUS):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    argv = [found("munged"), "--foreground", "--force", f"--socket={folder}/munge.socket"]
    argv += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    running = Slurm(folder)
    log = (folder / "munged.out").open("wb")
    running.children["munged"] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_for(folder / "munge.socket", running)
        if accounting:
            _account(running, dbd=dbd, sql=sql)
        for name in ("slurmctld", *NODES):
            running.start(name)
        running.wait_up()
        yield running
    finally:
        with suppress(subprocess.SubprocessError):
            running.tell("scancel", "--user=root", "--signal=KILL", "--full")
        for pid in (*_of(folder), *(child.pid for child in running.children.values())):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in running.children.values():
            child.wait()
        for each in (*probes, log):
            each.close()
        for node in NODES if constrained else ():
            with suppress(OSError):
                (MEMORY / f"slurm_{node}").rmdir()


def _account(running: Slurm, **ports: int) -> None:
    """Start the database and slurmdbd, and make the cluster known to them: root has the account root there."""
    folder = running.folder
    conf = (folder / "slurm.conf").read_text()
    of_slurmdbd = ACCOUNTING.format(folder=folder, **ports)
    (folder / "slurm.conf").write_text(conf.replace("accounting_storage/none", f"accounting_storage/{of_slurmdbd}"))
    (folder / "slurmdbd.conf").write_text(SLURMDBD.format(folder=folder, **ports))
    (folder / "slurmdbd.conf").chmod(0o600)
    (folder / "sql").mkdir()
    (procedures,) = (line for line in TABLES.read_text().splitlines() if " EXISTS proc (" in line)
    (folder / "sql.init").write_text(f"CREATE DATABASE mysql;\nUSE mysql;\n{procedures}\n")
    argv = [found("mariadbd"), *MARIADB.format(folder=folder, **ports).split()]
    with (folder / "mariadbd.out").open("wb") as out:
        running.children["mariadbd"] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    _wait_for(folder / "sql.socket", running)
    running.start("slurmdbd")
    deadline = time.monotonic() + START_S
    while True:
        try:
            running.tell("sacctmgr", "--immediate", "add", "cluster", "toy")
        except subprocess.CalledProcessError:
            assert time.monotonic() < deadline, running.logs()
        else:
            return


def _of(folder: Path) -> Iterator[int]:
    """Yield the pids of a cluster's daemons, of its jobs and of what watches over them, which is no daemon's child."""
    ours = f"SLURM_CONF={folder / 'slurm.conf'}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if int(environ.parent.name) != os.getpid() and ours in environ.read_bytes().split(b"\0"):
                yield int(environ.parent.name)


def found(name: str) -> str:
    return shutil.which(name) or f"/usr/sbin/{name}"


def _wait_for(path: Path, running: Slurm) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert running.children["munged"].poll() is None, (running.folder / "munged.out").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
