"""A host as the client sees it: the agent's verbs as methods, whatever the transport.

What a host answers is trusted neither for its size nor for its shape: what is wrong is a RemoteError.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from dgxlab.agent.boot import NO_AGENT, OPEN_ROOT
from dgxlab.errors import DgxlabError, HostError, RemoteError, by_exit_code, command, edit, one_line
from dgxlab.model import Experiment, Facts, HostEntry, Plan, canonical, digest, from_json
from dgxlab.model.events import FinalStatus, ModelFile
from dgxlab.model.result import Count, Details
from dgxlab.replies import Item, Removal
from dgxlab.transport.base import CommandFailed, Transport
from dgxlab.transport.bundle import BOOT, OLD_PYTHON, bundle

T = TypeVar("T")

NO_PYTHON = (126, 127)
"""Exit statuses by which a shell says that it cannot start the interpreter; the agent has none of them."""

AT_HOME = 'case "$NAME" in "~/"*) NAME="$HOME/${NAME#"~/"}";; esac; '
"""Makes a shell read ~/ at the beginning of a variable as it reads it in a word."""

# The settings are the first line of stdin: arguments can be read by every user of the host, and env may hold a token.
# A shell's read takes no byte more than the line, so that the rest of stdin is the agent's.
# -S: the agent needs the standard library alone, and looking for more takes a quarter of its start.
CALL = (
    f'r=$1 a="/agent/$2.pyz" p=$3 b=$4 v=$5; shift 5; {AT_HOME.replace("NAME", "r")}{AT_HOME.replace("NAME", "p")}'
    "IFS= read -r h; "
    'export DGXLAB_ROOT="$r" DGXLAB_HOST="$h"; exec "$p" -ES -c "$b" "$r$a" "$r" "$v" "$@"'
)

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What the id of a job may be: on both sides it becomes a file name."""

PATIENCE_S = 120.0
"""How long a verb may say nothing; following a job has no such limit."""

State = Literal["absent", "staged", "running", "done", "lost"]

MOST_BYTES = 64 << 20
"""How long a reply, or a line of a journal, may be: the largest that a job writes are a hundredth of it."""

Stdin = Callable[[], Iterable[bytes]]
"""Makes what a verb reads; anew for each attempt, so that a second one never goes on where the first one broke off.
`tuple` makes nothing."""


@dataclass(frozen=True)
class JobStatus:
    """A job's state on the host; `rc` is its final word.

    `cause` says why a job that left one is lost nevertheless.
    """

    job_id: str
    state: State
    journal_bytes: Count = 0
    rc: FinalStatus | None = None
    cause: str = ""


@dataclass(frozen=True)
class HostJob(JobStatus):
    """A job in the host's list, of any client; name and kind are "" where its plan cannot be read.

    What its final word says is not looked at: it may be of any version.
    """

    rc: Any = field(default=None, compare=False)
    name: str = ""
    kind: str = ""
    experiment: str = field(default="", compare=False)
    age_s: float | None = None


@dataclass(frozen=True)
class RawSize:
    """How many bytes of raw files a job has, and how many files."""

    size: Count
    files: Count

    @property
    def at_most(self) -> int:
        """How many bytes a tar of them can have, gzipped or not."""
        return self.size + self.size // 100 + 4096 * (self.files + 8)


@dataclass(frozen=True)
class Probe:
    """The host's answer to a first question."""

    facts: Facts
    missing: tuple[str, ...]
    models: Mapping[str, ModelFile | None]
    running: Mapping[str, str]
    """Jobs that run there, of any client: the digest of each one's experiment by job id."""
    to_send: tuple[str, ...]
    """Ids of synthetic models that it neither has nor can make."""
    absent: tuple[tuple[str, str], ...] = ()
    """What hosts.yaml names and the host does not have: key, and path or program."""

    def lacks(self, models: Sequence[str]) -> str:
        """Return what was asked and is not answered, "" for nothing."""
        asked = {*models, *Details.__annotations__}
        return ", ".join(sorted(asked - self.models.keys() - self.facts.details.keys()))


class Host:
    """Talks to the agent on one host; sends the agent itself when the host does not have this version.

    Args:
        transport: The way there.
        entry: What hosts.yaml says of it; None for nothing.
    """

    def __init__(self, transport: Transport, entry: HostEntry | None = None) -> None:
        entry = entry or HostEntry(transport.name)
        self.transport = transport
        self.entry = entry
        self.settings = canonical(
            {"name": entry.name, "path_prepend": entry.path_prepend, "env": entry.env, "lock": entry.lock}
        )
        self.name = transport.name
        self.calls = 0
        """Round trips so far."""
        self.answered = False
        """Whether it ever did what it was asked: from then on, what fails may be the way there, and not its address."""

    def probe(self, commits: Sequence[str] = (), models: Sequence[str] = (), synthetic: Sequence[str] = ()) -> Probe:
        """Ask for facts, which commits and models (files and ids) are there, and what runs, in one round trip."""
        request = canonical({"commits": commits, "models": models, "synthetic": synthetic}).encode()
        return self._ask(Probe, "probe", stdin=lambda: [request], wrong=lambda probe: probe.lacks(models))

    def send_objects(self, commit: str, shallow: Sequence[str], pack: Stdin) -> None:
        """Send a pack that completes `commit`."""
        header = canonical({"commit": commit, "shallow": list(shallow)}).encode() + b"\n"
        self._tell("receive", stdin=lambda: itertools.chain([header], pack()))

    def send_tool(self, name: str, version: str, sha256: str, wheel: Stdin) -> None:
        """Send a build tool's wheel; harmless to repeat."""
        self._tell("tool", name, version, sha256, stdin=wheel)

    def send_model(self, model_id: str, sha256: str, content: Stdin) -> None:
        """Send a synthetic model's f16 file; harmless to repeat."""
        self._tell("model", model_id, sha256, stdin=content)

    def submit(self, plan: Plan) -> JobStatus:
        """Stage and start a job; safe to repeat, it runs at most once."""
        content = canonical(plan).encode()
        digest = hashlib.sha256(content).hexdigest()
        return self._status(plan.job_id, "submit", digest, stdin=lambda: [content])

    def status(self, job_id: str) -> JobStatus:
        """Ask for a job's state."""
        return self._status(job_id, "status")

    def jobs(self) -> list[HostJob]:
        """Ask for every job on the host, oldest first; a folder whose name cannot be a job's is passed over."""
        return [job for job in self._ask(list[HostJob], "jobs") if JOB_ID.fullmatch(job.job_id)]

    def plan(self, job_id: str) -> tuple[Plan, str]:
        """Ask for the plan of a job of any client, and for the text that it was staged as.

        Raises:
            JobLost: if it is not there.
            RemoteError: if what the host has is not the plan of this job, or not one that this dgxlab can read.
        """
        reply = self._ask(dict[str, Any], "plan", job_id)
        try:
            plan = read_plan(reply)
        except ValueError as error:
            raise RemoteError(
                f"the plan of job {job_id} on host {self.name} cannot be read, follow it with the dgxlab that started "
                f"it: {error}",
                next="dgxlab --version",
            ) from error
        if plan.job_id != job_id or not JOB_ID.fullmatch(job_id):
            raise RemoteError(f"host {self.name} gave the plan of {plan.job_id!r} for job {job_id!r}")
        return plan, canonical(reply)

    def raw(self, job_id: str, limit: int, write: Callable[[bytes], object]) -> RawSize:
        """Pass a job's raw files to `write` as a gzipped tar, unless they are larger than `limit` bytes.

        Raises:
            JobLost: if the job is not there.
            UsageError: if it has not ended.
            RemoteError: if the host sends something else, or more than it announced.
        """
        pieces = self._call("raw", job_id, str(limit))
        head = b""
        for piece in pieces:
            head += piece
            if b"\n" in head or len(head) > 1000:
                break
        line, _, rest = head.partition(b"\n")
        told = understood(self.name, "raw", line, RawSize)
        left = told.at_most if told.size <= limit else 0
        for piece in itertools.chain([rest], pieces):
            left -= len(piece)
            if left < 0:
                raise RemoteError(f"host {self.name} sent more raw files of job {job_id} than it announced")
            write(piece)
        return told

    def cancel(self, job_id: str) -> JobStatus:
        """End a job and see that it is gone."""
        return self._status(job_id, "cancel")

    def inventory(self) -> list[Item]:
        """Ask what lies under the root, by kind, the longest unused first."""
        return self._ask(list[Item], "inventory")

    def remove(self, items: Iterable[Item]) -> Removal:
        """Remove things; what runs, or was used since `items` were listed, stays."""
        wanted = canonical([[item.kind, item.name, item.used] for item in items]).encode()
        return self._ask(Removal, "clean", stdin=lambda: [wanted])

    def follow(self, job_id: str, offset: int) -> Iterator[bytes]:
        """Yield pieces of the job's journal from byte `offset` on, each ending with a whole line, until it ends."""
        yield from whole_lines(self._call("follow", job_id, str(offset), patience_s=None), self.name, "follow")

    def _status(self, job_id: str, verb: str, *args: str, stdin: Stdin = tuple) -> JobStatus:
        """Return the status of this job: that of another one would end this one's record."""

        def wrong(status: JobStatus) -> str:
            return "" if status.job_id == job_id else f"it is about job {status.job_id!r}"

        return self._ask(JobStatus, verb, job_id, *args, stdin=stdin, wrong=wrong)

    def _ask(
        self, kind: type[T], verb: str, *args: str, stdin: Stdin = tuple, wrong: Callable[[T], str] = lambda _: ""
    ) -> T:
        return understood(self.name, verb, self._tell(verb, *args, stdin=stdin), kind, wrong)

    def _tell(self, verb: str, *args: str, stdin: Stdin) -> bytes:
        return whole(self._call(verb, *args, stdin=stdin), self.name, verb)

    def _call(
        self, verb: str, *args: str, stdin: Stdin = tuple, patience_s: float | None = PATIENCE_S
    ) -> Iterator[bytes]:
        for last in (False, True):
            try:
                yield from self._boot(verb, *args, stdin=stdin, patience_s=patience_s)
                return
            except CommandFailed as failure:
                if last or failure.rc != NO_AGENT:
                    raise self._error(verb, failure) from failure
            self._install()

    def _boot(self, verb: str, *args: str, stdin: Stdin, patience_s: float | None) -> Iterator[bytes]:
        way = self.transport
        argv = ["sh", "-c", CALL, "sh", way.root, bundle().digest, way.python, BOOT, verb, *args]
        settings = f"{self.settings}\n".encode()
        self.calls += 1
        yield from way.stream(argv, itertools.chain([settings], stdin()), patience_s=patience_s)
        self.answered = True

    def _install(self) -> None:
        content = bundle().packed()
        try:
            whole(self._boot("install", stdin=lambda: [content], patience_s=PATIENCE_S), self.name, "install")
        except CommandFailed as failure:
            if failure.rc != 1:
                raise self._error("install", failure) from failure
            raise RemoteError(
                f"the agent could not be put on host {self.name}: {failure.stderr.strip()}",
                next=self.entry.typed("df -h"),
            ) from failure

    def _error(self, verb: str, failure: CommandFailed) -> DgxlabError:
        way = self.transport
        if failure.rc in NO_PYTHON:
            return self._python(f"has no {way.python} that can be started", failure)
        if failure.rc == OLD_PYTHON:
            return self._python(f"has a {way.python} of version {' '.join(failure.stderr.split()[-1:])}", failure)
        lines = failure.stderr.strip().splitlines()
        if failure.rc == NO_AGENT:
            return RemoteError(
                f"host {self.name} has no whole agent though it was just sent", next=self.entry.typed("df -h")
            )
        try:
            if failure.rc == OPEN_ROOT:
                return self._open_root(*lines[-1].split(" ", 2))
            words = json.loads(lines[-1])
            mend, details = self.entry.next_of_agent(str(words["next"])), str(words["details"])
            return by_exit_code(words["exit_code"])(str(words["message"]), next=mend, details=details)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # of another shape
            last = lines[-1] if lines else "it said nothing"
            return RemoteError(
                f"the agent on host {way.name} failed at {verb} with exit status {failure.rc}: {last}",
                details=failure.stderr[-2000:],
            )

    def _open_root(self, owner: str, user: str, path: str) -> HostError:
        """Return the error about a folder in which others could put what would run as the user."""
        told, sudo = one_line(path), "" if int(owner) == int(user) else "sudo "
        if int(owner) in (0, int(user)):
            cause, mend = f"others may write in {told}", command("chmod", "go-w", path)
        else:
            cause, mend = f"{told} belongs to another user (uid {int(owner)})", command("chown", int(user), path)
        return HostError(
            f"host {self.name} is not safe: {cause}, so that they could run programs as you there; "
            "close that folder, or name another one as the host's root: in hosts.yaml",
            next=self.entry.typed(f"{sudo}{mend}"),
        )

    def _python(self, cause: str, failure: CommandFailed) -> RemoteError:
        return RemoteError(
            f"host {self.name} {cause}, and the agent needs Python 3.10 or newer: its python: in hosts.yaml names one",
            next=edit(self.entry.file or "hosts.yaml"),
            details=failure.stderr.strip()[-2000:],  # whether it is not there, or may not be run
        )


def read_plan(content: Any) -> Plan:
    """Return the plan that a job's folder holds; nothing in it is believed.

    Raises:
        ValueError: if it is none that this dgxlab can read.
    """
    plan = from_json(Plan, content)
    for spec in plan.specs:
        from_json(Experiment, {**spec, "path": "", "root": ""})
    if not {digest(spec) for spec in plan.specs} <= {plan.experiment, plan.baseline}:
        raise ValueError("it holds the spec of another experiment")
    return plan


def whole(pieces: Iterable[bytes], host: str, verb: str) -> bytes:
    """Return a reply in one piece.

    Raises:
        RemoteError: if it does not end in time.
    """
    reply = bytearray()
    for piece in pieces:
        reply += piece
        if len(reply) > MOST_BYTES:
            raise RemoteError(f"host {host} answered {verb} with more than {MOST_BYTES >> 20} MiB, and was left")
    return bytes(reply)


def whole_lines(pieces: Iterable[bytes], host: str, verb: str) -> Iterator[bytes]:
    """Yield pieces that each end with a whole line; what follows the last line is dropped.

    Raises:
        RemoteError: if a line does not end in time.
    """
    rest = b""
    for piece in pieces:
        rest += piece
        cut = rest.rfind(b"\n") + 1
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        if len(rest) > MOST_BYTES:
            raise RemoteError(
                f"host {host} answered {verb} with more than {MOST_BYTES >> 20} MiB in one line, and was left"
            )


def understood(host: str, verb: str, reply: bytes, kind: type[T], wrong: Callable[[T], str] = lambda _: "") -> T:
    """Return the record that the JSON in a reply is; `wrong` says what of it is no answer to what was asked.

    Raises:
        RemoteError: if it is no JSON, no such record, or no answer.
    """
    try:
        record = from_json(kind, json.loads(reply))
        if words := wrong(record):
            raise ValueError(words)
    except (ValueError, RecursionError) as error:
        raise RemoteError(
            f"host {host} answered {verb} with something else than dgxlab's agent does: "
            f"{reply[:200].decode(errors='replace')!r}",
            details=f"{type(error).__name__}: {error}"[:1000],
        ) from error
    return record
