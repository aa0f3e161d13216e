"""A host as the client sees it: each command (verb) of the agent is a method.

Replies of a host are not trusted: a wrong size or shape raises RemoteError.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from dgxlab.agent.boot import NO_AGENT, OPEN_ROOT
from dgxlab.errors import DgxlabError, HostError, RemoteError, by_exit_code, command, edit, one_line
from dgxlab.model import Experiment, Facts, HostEntry, Plan, Slurm, canonical, digest, from_json
from dgxlab.model.parts import Count, Details, FinalStatus, ModelFile
from dgxlab.replies import END, Item, Removal, Status
from dgxlab.transport.base import CommandFailed, Transport
from dgxlab.transport.bundle import BOOT, OLD_PYTHON, bundle

T = TypeVar("T")
State = Literal["absent", "staged", "queued", "running", "done", "lost", "elsewhere"]
Stdin = Callable[[], Iterable[bytes]]
"""Returns the stdin of a verb, in pieces; it is called once for each attempt. `tuple` is no input."""
Wrong = Callable[[T], str]  # returns why a reply does not match the request, "" if it does
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # a valid job id: on both sides it becomes a file name
_NO_PYTHON = (126, 127)
"""Exit statuses by which a shell says that it cannot start the interpreter; the agent has none of them."""
_PATIENCE_S = 120.0  # max silence of a verb; following a job has no such limit
MOST_BYTES = 64 << 20
"""Limit for a reply and for a line of a journal; the largest that a job writes have a hundredth of it."""

_AT_HOME = 'case "$NAME" in "~/"*) NAME="$HOME/${NAME#"~/"}";; esac; '
"""Shell text that replaces ~/ at the beginning of the variable NAME by the home folder."""
# The settings are the first line of stdin: arguments can be read by every user of the host, and env may hold a token.
# A shell's read takes no byte more than the line, so that the rest of stdin is the agent's.
# -S: the agent needs the standard library alone, and looking for more takes a quarter of its start.
_CALL = (
    f'r=$1 a="/agent/$2.pyz" p=$3 b=$4 v=$5; shift 5; {_AT_HOME.replace("NAME", "r")}{_AT_HOME.replace("NAME", "p")}'
    "IFS= read -r h; "
    'export DGXLAB_ROOT="$r" DGXLAB_HOST="$h"; exec "$p" -ES -c "$b" "$r$a" "$r" "$v" "$@"'
)


@dataclass(frozen=True)
class JobStatus(Status):
    """A job's state on the host, with the types that its reply must have."""

    state: State
    journal_bytes: Count = 0
    rc: FinalStatus | None = None


@dataclass(frozen=True)
class HostJob(JobStatus):
    """A job in the host's list, of any client; `name` and `shown_kind` are "" if its plan cannot be read."""

    rc: Any = field(default=None, compare=False)  # not decoded: it may be of any version
    name: str = ""
    shown_kind: str = ""
    experiment: str = field(default="", compare=False)
    age_s: float | None = None


@dataclass(frozen=True)
class RawSize:
    """Size of a job's raw files in bytes, and their number."""

    size: Count
    files: Count

    @property
    def at_most(self) -> int:
        """Most bytes that a tar of them can have, gzipped or not."""
        return self.size + self.size // 100 + 4096 * (self.files + 8)


@dataclass(frozen=True)
class ClusterNode:
    """A node of a cluster that takes jobs; `facts` are of the last job on it, None before the first."""

    name: str
    state: str
    facts: Facts | None = None


@dataclass(frozen=True)
class Probe:
    """What a host has, and what runs on it."""

    facts: Facts
    missing: tuple[str, ...]  # requested commits that it lacks
    models: Mapping[str, ModelFile | None]  # requested model files by path; None for a missing one
    running: Mapping[str, str]  # the subject of each running job, of any client, by job id
    to_send: tuple[str, ...]  # ids of requested synthetic models that it neither has nor can make
    absent: tuple[tuple[str, str], ...] = ()
    """(key of hosts.yaml, path or program) of each that the host does not have, and obstacles to any job."""
    nodes: tuple[ClusterNode, ...] = ()  # nodes of a cluster, those that are idle first


class Host:
    """Calls the agent on one host, and sends the agent first if the host lacks this version."""

    def __init__(self, transport: Transport, entry: HostEntry | None = None) -> None:
        self.transport, self.name = transport, transport.name
        self.entry = entry or HostEntry(transport.name)
        settings = {key: getattr(self.entry, key) for key in ("name", "path_prepend", "env", "lock", "processors")}
        if self.entry.slurm:
            settings["slurm"] = self.entry.slurm.options()
        self.settings = canonical(settings)
        self.calls = 0  # round trips so far
        self.answered = False
        """Whether any call succeeded: later failures are probably of the network, not a wrong address."""

    def probe(self, commits: Sequence[str] = (), models: Sequence[str] = (), synthetic: Sequence[str] = ()) -> Probe:
        """Return the host's facts, its running jobs, and which of these it has, in one round trip.

        `commits` are ids, `models` paths of model files on the host, `synthetic` model ids of recipes.
        """
        request = canonical({"commits": commits, "models": models, "synthetic": synthetic}).encode()
        asked = {*models, *Details.__annotations__}

        def unanswered(probe: Probe) -> str:
            return ", ".join(sorted(asked - probe.models.keys() - probe.facts.details.keys()))

        return self._ask(Probe, "probe", stdin=lambda: [request], wrong=unanswered)

    def send_objects(self, commit: str, shallow: Sequence[str], pack: Stdin) -> None:
        """Send the git objects that a commit needs; `shallow` are commits that are sent without their history."""
        header = canonical({"commit": commit, "shallow": list(shallow)}).encode() + b"\n"
        self._tell("receive", stdin=lambda: itertools.chain([header], pack()))

    def send_tool(self, name: str, version: str, sha256: str, wheel: Stdin) -> None:
        """Send a build tool's wheel, which must have that sha256; harmless to repeat."""
        self._tell("tool", name, version, sha256, stdin=wheel)

    def send_model(self, model_id: str, sha256: str, content: Stdin) -> None:
        """Send a synthetic model's F16 file, which must have that sha256; harmless to repeat."""
        self._tell("model", model_id, sha256, stdin=content)

    def submit(self, plan: Plan) -> JobStatus:
        """Send a plan and start its job; safe to repeat, because the job runs at most once."""
        content = canonical(plan).encode()
        return self._status(plan.job_id, "submit", hashlib.sha256(content).hexdigest(), stdin=lambda: [content])

    def status(self, job_id: str) -> JobStatus:
        """Return a job's state."""
        return self._status(job_id, "status")

    def cancel(self, job_id: str) -> JobStatus:
        """End a job and all its processes, and return its state then."""
        return self._status(job_id, "cancel")

    def jobs(self) -> list[HostJob]:
        """Return all jobs of the root, of any client, oldest first, then those `elsewhere` that measure."""
        return [job for job in self._ask(list[HostJob], "jobs") if JOB_ID.fullmatch(job.job_id)]

    def plan(self, job_id: str) -> tuple[Plan, str]:
        """Return the plan of a job of any client, and the JSON text that the plan was sent as.

        Raises:
            JobLost: if it is not there.
            RemoteError: if the host returns the plan of another job, or one that this version of dgxlab cannot read.
        """
        reply = self._ask(dict[str, Any], "plan", job_id)
        try:
            plan = read_plan(reply)
        except ValueError as error:
            why = f"cannot be read, follow it with the dgxlab that started it: {error}"
            raise RemoteError(f"the plan of job {job_id} on host {self.name} {why}", next="dgxlab --version") from error
        if plan.job_id != job_id or not JOB_ID.fullmatch(job_id):
            raise RemoteError(f"host {self.name} gave the plan of {plan.job_id!r} for job {job_id!r}")
        return plan, canonical(reply)

    def raw(self, job_id: str, limit: int, write: Callable[[bytes], object]) -> RawSize:
        """Pass the pieces of a gzipped tar of a job's raw files to `write`, and return the files' size.

        Nothing is passed if the files have more than `limit` bytes.

        Raises:
            JobLost: if the job is not there.
            UsageError: if it has not ended.
            RemoteError: if the host sends something else, or more than it announced.
        """
        pieces, head = self._call("raw", job_id, str(limit)), b""
        while b"\n" not in head and len(head) <= 1000 and (piece := next(pieces, b"")):
            head += piece
        line, _, rest = head.partition(b"\n")
        announced = self._understood(RawSize, "raw", line)
        left = announced.at_most if announced.size <= limit else 0
        for piece in itertools.chain([rest], pieces):
            left -= len(piece)
            if left < 0:
                raise RemoteError(f"host {self.name} sent more raw files of job {job_id} than it announced")
            write(piece)
        return announced

    def at(self, slurm: Slurm | None) -> Host:
        """Return this host with other options for its jobs; None starts them on the login node."""
        return Host(self.transport, replace(self.entry, slurm=slurm))

    def cluster(self) -> list[tuple[str, str, str]]:
        """Return (name, state, sentence) of each check of a cluster."""
        return self._ask(list[tuple[str, str, str]], "cluster")

    def inventory(self) -> list[Item]:
        """Return what the agent keeps on the host, by kind, the longest unused first."""
        return self._ask(list[Item], "inventory")

    def remove(self, items: Iterable[Item]) -> Removal:
        """Remove items from the host, except those in use and those used since they were listed."""
        wanted = canonical([[item.kind, item.name, item.used] for item in items]).encode()
        return self._ask(Removal, "clean", stdin=lambda: [wanted])

    def follow(self, job_id: str, offset: int, take: Callable[[bytes], object]) -> JobStatus:
        """Pass whole lines of a job's journal from byte `offset` on to `take` until it ends; return its state then."""
        state = b""
        for piece in whole_lines(self._call("follow", job_id, str(offset), patience_s=None), self.name, "follow"):
            *lines, last = piece.splitlines(keepends=True)
            if last.startswith(END):
                state = last.removeprefix(END)
            else:
                lines.append(last)
            if lines:
                take(b"".join(lines))
        return self._understood(JobStatus, "follow", state, _of(job_id))

    def build_output(self, job_id: str) -> Iterator[bytes]:
        """Yield what a job's builds print, from the beginning on, until the job has built or ended."""
        yield from self._call("output", job_id, patience_s=None)

    def _status(self, job_id: str, verb: str, *args: str, stdin: Stdin = tuple) -> JobStatus:
        return self._ask(JobStatus, verb, job_id, *args, stdin=stdin, wrong=_of(job_id))

    def _ask(self, kind: type[T], verb: str, *args: str, stdin: Stdin = tuple, wrong: Wrong[T] = lambda _: "") -> T:
        return self._understood(kind, verb, self._tell(verb, *args, stdin=stdin), wrong)

    def _understood(self, kind: type[T], verb: str, reply: bytes, wrong: Wrong[T] = lambda _: "") -> T:
        """Decode a reply's JSON to a record."""
        try:
            record = from_json(kind, json.loads(reply))
            if words := wrong(record):
                raise ValueError(words)
        except (ValueError, RecursionError) as error:
            raise RemoteError(
                f"host {self.name} answered {verb} otherwise than dgxlab's agent does: "
                f"{reply[:200].decode(errors='replace')!r}",
                details=f"{type(error).__name__}: {error}"[:1000],
            ) from error
        return record

    def _tell(self, verb: str, *args: str, stdin: Stdin) -> bytes:
        return whole(self._call(verb, *args, stdin=stdin), self.name, verb)

    def _call(
        self, verb: str, *args: str, stdin: Stdin = tuple, patience_s: float | None = _PATIENCE_S
    ) -> Iterator[bytes]:
        for last in (False, True):
            try:
                yield from self._boot(verb, *args, stdin=stdin, patience_s=patience_s)
                return
            except CommandFailed as failure:
                if last or failure.rc != NO_AGENT:
                    raise self._error(verb, failure) from failure
            self._install()

    def _boot(self, verb: str, *args: str, stdin: Stdin, patience_s: float | None = _PATIENCE_S) -> Iterator[bytes]:
        way = self.transport
        argv = ["sh", "-c", _CALL, "sh", way.root, bundle().digest, way.python, BOOT, verb, *args]
        settings = f"{self.settings}\n".encode()
        self.calls += 1
        yield from way.stream(argv, itertools.chain([settings], stdin()), patience_s=patience_s)
        self.answered = True

    def _install(self) -> None:
        content = bundle().packed()
        try:
            whole(self._boot("install", stdin=lambda: [content]), self.name, "install")
        except CommandFailed as failure:
            if failure.rc != 1:
                raise self._error("install", failure) from failure
            why = f"the agent could not be put on host {self.name}: {failure.stderr.strip()}"
            raise RemoteError(why, next=self.entry.typed("df -h")) from failure

    def _error(self, verb: str, failure: CommandFailed) -> DgxlabError:
        rc, stderr, python = failure.rc, failure.stderr.strip(), self.transport.python
        lines = stderr.splitlines()
        if rc in (*_NO_PYTHON, OLD_PYTHON):
            cause = f"has no {python} that can be started"
            if rc == OLD_PYTHON:
                cause = f"has a {python} of version {' '.join(stderr.split()[-1:])}"
            return RemoteError(
                f"host {self.name} {cause}, and the agent needs Python 3.10 or newer: its python: in hosts.yaml names "
                "one",
                next=edit(self.entry.file or "hosts.yaml"),
                details=stderr[-2000:],  # whether it is not there, or may not be run
            )
        if rc == NO_AGENT:
            why = f"host {self.name} has an incomplete agent right after it was sent"
            return RemoteError(why, next=self.entry.typed("df -h"))
        try:
            if rc == OPEN_ROOT:
                return self._open_root(*lines[-1].split(" ", 2))
            words = json.loads(lines[-1])
            mend, details = self.entry.next_of_agent(str(words["next"])), str(words["details"])
            return by_exit_code(words["exit_code"])(str(words["message"]), next=mend, details=details)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # of another shape
            last = lines[-1] if lines else "it said nothing"
            why = f"the agent on host {self.name} failed at {verb} with exit status {rc}: {last}"
            return RemoteError(why, details=failure.stderr[-2000:])

    def _open_root(self, owner: str, user: str, path: str) -> HostError:
        """Return the error for a folder in which another user could plant a program."""
        folder, sudo = one_line(path), "" if int(owner) == int(user) else "sudo "
        if int(owner) in (0, int(user)):
            cause, mend = f"others may write in {folder}", command("chmod", "go-w", path)
        else:
            cause, mend = f"{folder} belongs to another user (uid {int(owner)})", command("chown", int(user), path)
        return HostError(
            f"host {self.name} is not safe: {cause}, so that they could run programs as you there; "
            "close that folder, or name another one as the host's root: in hosts.yaml",
            next=self.entry.typed(f"{sudo}{mend}"),
        )


def _of(job_id: str) -> Wrong[JobStatus]:
    return lambda status: "" if status.job_id == job_id else f"it is about job {status.job_id!r}"


def read_plan(content: Any) -> Plan:
    """Decode a plan that was read from JSON; ValueError if it is no plan, or has other specs than its digests say."""
    plan = from_json(Plan, content)
    for spec in plan.specs:
        from_json(Experiment, {**spec, "path": "", "root": ""})
    if not {digest(spec) for spec in plan.specs} <= {plan.experiment, plan.baseline}:
        raise ValueError("it holds the spec of another experiment")
    return plan


def whole(pieces: Iterable[bytes], host: str, verb: str) -> bytes:
    """Join the pieces of a host's reply to a verb; RemoteError if they have more than MOST_BYTES."""
    reply = bytearray()
    for piece in pieces:
        reply += piece
        if len(reply) > MOST_BYTES:
            raise RemoteError(
                f"host {host} answered {verb} with more than {MOST_BYTES >> 20} MiB; dgxlab reads no further"
            )
    return bytes(reply)


def whole_lines(pieces: Iterable[bytes], host: str, verb: str) -> Iterator[bytes]:
    """Cut a host's reply to a verb into pieces of whole lines; RemoteError for a line of more than MOST_BYTES."""
    rest = b""
    for piece in pieces:
        rest += piece
        if cut := rest.rfind(b"\n") + 1:
            yield rest[:cut]
            rest = rest[cut:]
        if len(rest) > MOST_BYTES:
            size = f"{MOST_BYTES >> 20} MiB"
            raise RemoteError(f"host {host} answered {verb} with more than {size} in one line; dgxlab reads no further")
