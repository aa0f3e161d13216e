"""Slurm starts the agent of a job where the host has slurm: in hosts.yaml; here nothing is scheduled.

A job's id is its name there: one sbatch starts it, and squeue, then sacct, find it by that name, also after an answer
was lost. What the job's own folder says goes before what Slurm says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgxlab.agent.boot import me, settle
from dgxlab.agent.environment import JOB, PATIENCE_S, Root, ask, search_path, settings
from dgxlab.errors import AGAIN, RemoteError, one_line

if TYPE_CHECKING:
    from dgxlab.model import Facts

FILE = "slurm.json"  # in the folder of a job that Slurm starts: the host's settings, which its agent reads
BEFORE_LIMIT_S = 60  # Slurm sends TERM to the agent so long before the time limit; it may do so up to a minute earlier
_BEGAN = time.monotonic()  # when this program began: in an agent, about when its job did

_ENDED = re.compile("BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT")
_WAITING = re.compile("PENDING|CONFIGURING|REQUEUED|REQUEUE_FED|REQUEUE_HOLD|RESV_DEL_HOLD|SPECIAL_EXIT")
_LOOKS_S = (0.5, 10.0)  # first and longest pause between two questions to slurmctld about a job that is followed
_Ran = subprocess.CompletedProcess[str]
_CARRIED = ("PATH", "HOME", "USER", "LOGNAME", "DGXLAB_ROOT", "DGXLAB_LOCKS")
"""Variables of the login that a job has too."""
_TAKES_JOBS = ("idle", "plnd", "mix", "comp", "alloc")
"""States of nodes, as sinfo abbreviates them, without the marks of those that sleep or are planned for another job."""
_OPTIONS = re.compile("(SBATCH|SRUN|SQUEUE|SINFO|SACCT|SCANCEL|SLURM)_(?!CONF|JWT)")
"""Variables that are options to Slurm's programs: what the login sets for its user must not change a job."""
_DRY = "#!/bin/sh\n:\n"
_SEEN, _APART = "lock-seen", "lock-not-seen"  # printed on a node: whether it sees a lock that this machine holds


class Silent(RemoteError):
    """Slurm did not answer: a job may run or not."""


@dataclass(frozen=True)
class Submitted:
    """A job as Slurm knows it; `expected` is when it began or will begin, "" if unknown."""

    number: str
    state: str  # Slurm's own word, as PENDING or TIMEOUT
    reason: str = ""
    expected: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether it will not run any more."""
        return bool(_ENDED.fullmatch(self.state))

    @property
    def waiting(self) -> bool:
        """Whether it has not begun."""
        return bool(_WAITING.fullmatch(self.state))

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        when = f", expected at {self.expected.replace('T', ' ')}" if self.waiting and self.expected else ""
        return one_line(f"{self.state}{why}{when}, Slurm job {self.number}", 300)


class Watched:
    """A job that is looked at again and again: slurmctld is asked less often as long as the answer stays the same."""

    def __init__(self, job_id: str) -> None:
        self._job_id, self._next, self._pause_s = job_id, 0.0, _LOOKS_S[0]
        self._seen: Submitted | None = None

    def look(self) -> Submitted | None:
        """Return the job as Slurm knows it, None if it does not; raises Silent."""
        if time.monotonic() >= self._next:
            seen = look(self._job_id)
            self._pause_s = min(2 * self._pause_s, _LOOKS_S[1]) if seen == self._seen else _LOOKS_S[0]
            self._seen, self._next = seen, time.monotonic() + self._pause_s
        return self._seen


def look(job_id: str) -> Submitted | None:
    """Return a job as Slurm knows it, by its name; None if neither squeue nor sacct knows it. Raises Silent."""
    user = f"--user={os.getuid()}"
    asked = _run("squeue", "--noheader", "--states=all", user, f"--name={job_id}", "--format=%i|%T|%r|%S|%N")
    if asked.returncode != 0:
        raise Silent(f"squeue on {settings().name} failed: {_said(asked)}", next=AGAIN)
    jobs = [_read(line) for line in asked.stdout.splitlines() if line.count("|") == 4]
    if not jobs:  # a day old, or the user has no accounting: then nothing is known
        form = "--format=JobIDRaw,State,Reason,Start,NodeList"
        words = ("--allocations", "--noheader", "--parsable2", user, f"--name={job_id}", "--starttime=now-30days", form)
        with contextlib.suppress(Silent):
            jobs = [_read(line) for line in _run("sacct", *words).stdout.splitlines() if line.count("|") == 4]
    return min(jobs, key=lambda each: (each.ended, int(each.number)), default=None)


def submit(folder: Path) -> None:
    """Submit the job in a folder, unless Slurm has it already.

    Raises:
        Silent: if Slurm does not answer; nothing was submitted then.
        RemoteError: if Slurm refuses it.
    """
    job_id = folder.name
    with (folder / FILE).open("a+") as file:
        with contextlib.suppress(OSError):  # two clients at once; the agent's own start decides where this is refused
            fcntl.flock(file, fcntl.LOCK_EX)
        if look(job_id):
            return
        (folder / FILE).chmod(0o600)  # its env may hold a token
        file.truncate(0)
        file.write(os.environ.get("DGXLAB_HOST", "{}"))
        file.flush()
        node = json.loads((folder / "plan.json").read_text()).get("node", "")
        answer = _run("sbatch", *_options(job_id), *[f"--nodelist={node}"] * bool(node), stdin=_script(folder))
    if answer.returncode != 0 and ((there := look(job_id)) is None or there.ended):
        raise RemoteError(f"Slurm refused the job: {_said(answer)}", next=f"dgxlab doctor {settings().name}")


def cancel(job_id: str) -> None:
    """End this job alone with scancel; nothing happens if it has ended. Raises RemoteError if Slurm refuses."""
    job = look(job_id)
    if job and not job.ended:
        answer = _run("scancel", f"--user={os.getuid()}", f"--name={job_id}", job.number)
        if answer.returncode != 0:
            raise RemoteError(f"scancel {job.number} failed: {_said(answer)}", next=AGAIN)


def why_ended() -> str:
    """Return, in an agent that has got TERM, why Slurm ends its job: TIMEOUT, PREEMPTED or CANCELLED."""
    number = os.environ.get("SLURM_JOB_ID", "")
    with contextlib.suppress(Silent, LookupError, ValueError):
        shown = dict(re.findall(r"(\w+)=(\S*)", _run("scontrol", "--oneliner", "show", "job", number).stdout))
        if shown.get("PreemptTime", "None") != "None":
            return "PREEMPTED"
        # both by slurmctld's clock, which this node's need not agree with
        start, end = (time.mktime(time.strptime(shown[name], "%Y-%m-%dT%H:%M:%S")) for name in ("StartTime", "EndTime"))
        left_s = end - start - (time.monotonic() - _BEGAN)
        if shown["JobState"] == "RUNNING" and left_s < 3 * BEFORE_LIMIT_S:
            return f"TIMEOUT, its time limit is {shown['TimeLimit']}"
    return "CANCELLED"


def allocation() -> dict[str, str]:
    """Return what Slurm has given to this process: job, partition, node, account, GPUs; {} outside of a Slurm job."""
    names = {
        "job": "SLURM_JOB_ID",
        "partition": "SLURM_JOB_PARTITION",
        "nodes": "SLURM_JOB_NODELIST",
        "node": "SLURMD_NODENAME",
        "account": "SLURM_JOB_ACCOUNT",
        "cpus": "SLURM_CPUS_ON_NODE",
        "gpus": "CUDA_VISIBLE_DEVICES",
        "cluster": "SLURM_CLUSTER_NAME",
    }
    inside = {"SLURM_JOB_ID", "SLURMD_NODENAME"} <= os.environ.keys()
    return {key: os.environ[name] for key, name in names.items() if name in os.environ} if inside else {}


def granted(gpus: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those of a node's GPUs that Slurm has given to this process; all outside of a Slurm job."""
    named = allocation().get("gpus", "").split(",")
    if "NoDevFiles" in named:  # Slurm's word for none
        return []
    return [gpu for gpu in gpus if gpu["index"] in named or gpu["uuid"] in named] or list(gpus)


# -- nodes ------------------------------------------------------------------------------------------------------------


def remember(root: Root, facts: Facts) -> None:
    """Keep the facts of this node for the client, which plans without a node; nothing outside of a Slurm job."""
    from dgxlab.model import to_json

    if node := allocation().get("node"):
        folder = root.path / "nodes"
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f".{node}-{me()}"
        part.write_text(json.dumps(to_json(facts)))
        settle(part, folder / f"{node}.json")


def nodes(root: Root) -> list[dict[str, Any]]:
    """Return name, state and facts of each node that may take a job, idle ones first; facts are None before its first.

    Raises Silent if Slurm does not answer.
    """
    chosen = [word for word in settings().slurm or () if word.startswith(("--partition=", "--nodelist="))]
    words = [word.replace("--nodelist=", "--nodes=") for word in chosen]
    asked = _run("sinfo", "--noheader", "--Node", "--format=%N|%t", *words)
    if asked.returncode != 0:
        raise Silent(f"sinfo on {settings().name} failed: {_said(asked)}", next=AGAIN)
    states = dict(line.split("|") for line in asked.stdout.splitlines() if line.count("|") == 1)
    up = {name: state for name, state in states.items() if state.rstrip("~#-+") in _TAKES_JOBS}
    order = sorted(up, key=lambda name: (_TAKES_JOBS.index(up[name].rstrip("~#-+")), name))
    return [{"name": name, "state": up[name], "facts": _facts(root, name)} for name in order]


def _facts(root: Root, node: str) -> Any:
    try:
        return json.loads((root.path / "nodes" / f"{node}.json").read_text())
    except (OSError, ValueError):
        return None


def examine(root: Root) -> Iterator[tuple[str, str, str]]:
    """Yield (name, state, sentence) for each check of the cluster; the state is as in `lab.doctor.Finding`."""
    try:
        yield from _examined(root)
    except Silent as silent:
        yield "slurm", "missing", silent.message


def _examined(root: Root) -> Iterator[tuple[str, str, str]]:
    yield "sbatch", "ok", _run("sbatch", "--version").stdout.strip()
    available = nodes(root)
    idle = sum(node["state"].startswith("idle") for node in available)
    yield ("nodes", "ok" if available else "missing", f"{len(available)} take jobs, {idle} of them idle")
    tried = _run("sbatch", "--test-only", *_options("dgxlab-doctor"), stdin=_DRY)
    yield ("submit", "missing" if tried.returncode else "ok", _said(tried).removeprefix("sbatch: "))
    try:
        known = _run("sacct", "--noheader", "--allocations", "--starttime=now")
        why = _said(known) if known.returncode else ""
    except Silent as silent:
        why = silent.message
    none = f"cannot be asked ({why}): how a job ended is known only for a while after its end"
    yield ("sacct", "note", none) if why else ("sacct", "ok", "can be asked how a job ended")
    if tried.returncode == 0:
        yield from _on_a_node(root)


def _on_a_node(root: Root) -> Iterator[tuple[str, str, str]]:
    """Look at the root, and at a lock of this machine, from a node, where one is free now."""
    agent = shlex.join([sys.executable, "-ES", str(Path(sys.argv[0])), "node", str(root.path)])
    options = [word for word in settings().slurm or () if not word.startswith("--time=")]
    words = ("--immediate=10", "--time=1", "--nodes=1", "--ntasks=1", "--quiet", "--chdir=/", *options)
    with (root.path / "doctor.lock").open("ab") as file:
        locks = "whether its locks are is not known: the node has no flock"
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            locks = f"it has no locks ({error.strerror})"
        # flock ends with 9 where it saw the lock; a node without flock says nothing
        take = f"flock --nonblock --conflict-exit-code 9 {shlex.quote(file.name)} echo {_APART}"
        look = f"{take}; [ $? = 9 ] && echo {_SEEN}; {agent}"
        ran = _run("srun", *words, "sh", "-c", look, patience_s=3 * PATIENCE_S)
    if ran.returncode == 0 and ran.stdout.strip():
        lines = ran.stdout.splitlines()
        facts = json.loads(lines[-1])
        nvcc = facts["toolchain"]["nvcc"] or "no nvcc"
        gpus = ", ".join(gpu["name"] or "?" for gpu in facts["details"]["gpus"]) or "no GPU"
        (kind,) = ask([["stat", "--file-system", "--format=%T", str(root.path)]])
        tried = {_APART: "its locks are not", _SEEN: "and so are its locks"}
        locks = next((tried[line] for line in lines if line in tried), locks)
        node = facts["details"]["slurm"]["node"]
        yield "root", "ok", f"{root.path} ({kind.text.strip()}) is shared with node {node}, {locks}"
        yield "node", "ok", f"{facts['toolchain']['cxx'] or 'no C++ compiler'}; {nvcc}; {gpus}"
    elif "mmediate" in ran.stderr or "Unable to allocate" in ran.stderr:
        yield "node", "note", f"none is free now, so none was looked at: {_said(ran)}"
    else:
        why = f"the agent in {root.path} does not run on a node, which must see the same folder"
        yield "root", "missing", f"{why}: {_said(ran)}"


# -- Slurm's programs -------------------------------------------------------------------------------------------------


def _options(job_id: str) -> list[str]:
    # NIL is NONE without a login shell on the node, for which Slurm waits a second and may hold the job
    ours = ["--parsable", "--export=NIL", f"--job-name={job_id}", "--no-requeue", "--nodes=1", "--ntasks=1"]
    where = ["--output=/dev/null", "--chdir=/", f"--signal=B:TERM@{BEFORE_LIMIT_S}"]
    return [*ours, *where, *(settings().slurm or ())]


def _script(folder: Path) -> str:
    """Return the batch script, which becomes the agent: Slurm's signals reach it at once."""
    variables = {JOB: folder.name, **{name: os.environ[name] for name in _CARRIED if name in os.environ}}
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    start = shlex.join([sys.executable, "-ES", str(folder / "agent.pyz"), "work", str(folder)])
    return (
        f"#!/bin/sh\nexec 2>>{shlex.quote(str(folder / 'agent.err'))}\n"
        f'export {exports} DGXLAB_HOST="$(cat {shlex.quote(str(folder / FILE))})"\nexec {start}\n'
    )


def _run(program: str, *words: str, stdin: str = "", patience_s: float = PATIENCE_S) -> _Ran:
    """Run one of Slurm's programs; raises Silent if it is missing or does not end in time."""
    env = {name: value for name, value in os.environ.items() if not _OPTIONS.match(name)}
    env |= {"PATH": search_path(), "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            [program, *words], input=stdin, capture_output=True, text=True, env=env, timeout=patience_s, check=False
        )
    except FileNotFoundError:
        why = f"there is no {program} on the PATH of {settings().name}; path_prepend: can name its folder"
        raise Silent(why, next=f"dgxlab doctor {settings().name}") from None
    except subprocess.TimeoutExpired:
        raise Silent(f"{program} on {settings().name} did not end within {patience_s:g} s", next=AGAIN) from None


def _said(ran: _Ran) -> str:
    lines = [line for line in (ran.stderr.strip() or ran.stdout.strip()).splitlines() if line.strip()]
    return one_line("; ".join(lines) or f"exit status {ran.returncode}", 300)


def _read(line: str) -> Submitted:
    number, state, reason, expected, nodes_ = line.strip().split("|")
    when = "" if expected in ("N/A", "Unknown", "None") else expected
    return Submitted(number.partition("_")[0], state.split()[0].rstrip("+"), reason, when, nodes_)
