"""A host as the client sees it: the agent's verbs as methods, whatever the transport."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from dgxlab.agent.inventory import Item, Removal
from dgxlab.errors import DgxlabError, RemoteError, by_exit_code
from dgxlab.model import Facts, HostEntry, Plan, Step, canonical, from_json
from dgxlab.transport.base import CommandFailed, Transport
from dgxlab.transport.bundle import OLD_PYTHON, bundle

NO_AGENT = 97
"""Exit status by which the host says that this version of the agent is not there yet."""
NO_PYTHON = (126, 127)
"""Exit statuses by which a shell says that it cannot start the interpreter; the agent has none of them."""

_ROOT = 'r=$1; case "$r" in "~/"*) r="$HOME/${r#"~/"}";; esac; a="$r/agent/$2.pyz"; '
# -S: the agent needs the standard library alone, and looking for more takes a quarter of its start
CALL = _ROOT + (
    f'[ -f "$a" ] || exit {NO_AGENT}; p=$3 h=$4 v=$5; shift 5; '
    'export DGXLAB_ROOT="$r" DGXLAB_HOST="$h"; exec "$p" -ES "$a" "$v" "$r" "$@"'
)
INSTALL = (
    _ROOT + 'umask 077; mkdir -p "$r/agent" && cat >"$a.$$" && '
    '[ "$(sha256sum <"$a.$$" | cut -d" " -f1)" = "$3" ] && mv "$a.$$" "$a"'
)

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What the id of a job may be: on both sides it becomes a file name."""

PATIENCE_S = 120.0
"""How long a verb may say nothing; following a job has no such limit."""

Stdin = Callable[[], Iterable[bytes]]
"""Makes what a verb reads; anew for each attempt, so that a second one never goes on where the first one broke off."""


def nothing() -> Iterable[bytes]:
    """Return an empty stdin."""
    return ()


@dataclass(frozen=True)
class JobStatus:
    """A job's state on the host: absent, staged, running, done or lost; `rc` is its final word."""

    job_id: str
    state: str
    journal_bytes: int = 0
    rc: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class HostJob(JobStatus):
    """A job in the host's list, whoever started it; name and kind are "" where its plan cannot be read."""

    name: str = ""
    kind: str = ""
    age_s: float | None = None


@dataclass(frozen=True)
class RawSize:
    """How many bytes of raw files a job has, and how many files."""

    size: int
    files: int

    @property
    def at_most(self) -> int:
        """How many bytes a tar of them can have, gzipped or not."""
        return self.size + self.size // 100 + 4096 * (self.files + 8)


@dataclass(frozen=True)
class Probe:
    """The host's answer to a first question."""

    facts: Facts
    missing: tuple[str, ...]
    models: Mapping[str, Mapping[str, Any] | None]
    running: Mapping[str, str]
    """Jobs that run there, whoever started them: the digest of each one's experiment by job id."""
    to_send: tuple[str, ...]
    """Ids of synthetic models that it neither has nor can make."""


class Host:
    """Talks to the agent on one host; sends the agent itself when the host does not have this version.

    Args:
        transport: The way there.
        entry: What hosts.yaml says of it; None for nothing.
    """

    def __init__(self, transport: Transport, entry: HostEntry | None = None) -> None:
        entry = entry or HostEntry(transport.name)
        self.transport = transport
        self.settings = canonical({"path_prepend": entry.path_prepend, "env": entry.env, "lock": entry.lock})
        self.name = transport.name
        self.calls = 0
        """Round trips so far."""

    def probe(self, commits: Sequence[str] = (), models: Sequence[str] = (), synthetic: Sequence[str] = ()) -> Probe:
        """Ask for facts, which commits and models (files and ids) are there, and what runs, in one round trip."""
        reply = self._ask("probe", canonical({"commits": commits, "models": models, "synthetic": synthetic}))
        facts, missing, to_send = from_json(Facts, reply["facts"]), tuple(reply["missing"]), tuple(reply["to_send"])
        return Probe(facts, missing, reply["models"], reply["running"], to_send)

    def send_objects(self, commit: str, shallow: Sequence[str], pack: Stdin) -> None:
        """Send a pack that completes `commit`."""
        header = canonical({"commit": commit, "shallow": list(shallow)}).encode() + b"\n"

        def body() -> Iterator[bytes]:
            yield header
            yield from pack()

        b"".join(self._call("receive", stdin=body))

    def send_tool(self, name: str, version: str, sha256: str, wheel: Stdin) -> None:
        """Send a build tool's wheel; harmless to repeat."""
        b"".join(self._call("tool", name, version, sha256, stdin=wheel))

    def send_model(self, model_id: str, sha256: str, content: Stdin) -> None:
        """Send a synthetic model's f16 file; harmless to repeat."""
        b"".join(self._call("model", model_id, sha256, stdin=content))

    def submit(self, plan: Plan) -> JobStatus:
        """Stage and start a job; safe to repeat, it runs at most once."""
        content = canonical(plan).encode()
        return _status(self._ask("submit", plan.job_id, hashlib.sha256(content).hexdigest(), stdin=lambda: [content]))

    def status(self, job_id: str) -> JobStatus:
        """Ask for a job's state."""
        return _status(self._ask("status", job_id))

    def jobs(self) -> list[HostJob]:
        """Ask for every job on the host, oldest first; a folder whose name cannot be a job's is passed over."""
        return [_listed(reply) for reply in self._ask("jobs") if JOB_ID.fullmatch(reply["job_id"])]

    def plan(self, job_id: str) -> Plan:
        """Ask for the plan of a job, whoever started it.

        Raises:
            JobLost: if it is not there.
            RemoteError: if what the host has is not the plan of this job, or not one that this dgxlab can read.
        """
        reply = self._ask("plan", job_id)
        try:
            plan = from_json(Plan, reply)
            if not all(isinstance(step, get_args(Step)) for step in plan.steps):
                raise ValueError("its steps are none")
        except (ValueError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"the plan of job {job_id} on host {self.name} cannot be read: {error}",
                next="follow it with the dgxlab that started it",
            ) from error
        if plan.job_id != job_id or not JOB_ID.fullmatch(job_id):
            raise RemoteError(f"host {self.name} gave the plan of {plan.job_id!r} for job {job_id!r}")
        return plan

    def raw(self, job_id: str, limit: int, write: Callable[[bytes], object]) -> RawSize:
        """Pass a job's raw files to `write` as a gzipped tar, unless they are larger than `limit` bytes.

        Raises:
            JobLost: if the job is not there.
            UsageError: if it has not ended.
            RemoteError: if the host sends something else, or more than it announced.
        """
        pieces = self._call("raw", job_id, str(limit))
        line, rest = _first_line(pieces)
        told = self._raw_size(line)
        left = told.at_most if told.size <= limit else 0
        for piece in itertools.chain([rest], pieces):
            left -= len(piece)
            if left < 0:
                raise RemoteError(f"host {self.name} sent more raw files of job {job_id} than it announced")
            write(piece)
        return told

    def _raw_size(self, line: bytes) -> RawSize:
        try:
            told = json.loads(line)
            return RawSize(int(told["size"]), int(told["files"]))
        except (ValueError, LookupError, TypeError) as error:
            raise RemoteError(f"host {self.name} answered raw with {line[:200]!r}") from error

    def cancel(self, job_id: str) -> JobStatus:
        """End a job and see that it is gone."""
        return _status(self._ask("cancel", job_id))

    def inventory(self) -> list[Item]:
        """Ask what lies under the root, by kind, the longest unused first."""
        return [from_json(Item, reply) for reply in self._ask("inventory")]

    def remove(self, items: Iterable[Item]) -> Removal:
        """Remove things; what runs, or was used since `items` were listed, stays."""
        wanted = canonical([[item.kind, item.name, item.used] for item in items]).encode()
        return from_json(Removal, self._ask("clean", stdin=lambda: [wanted]))

    def follow(self, job_id: str, offset: int) -> Iterator[bytes]:
        """Yield pieces of the job's journal from byte `offset` on, each ending with a whole line, until it ends."""
        rest = b""
        for chunk in self._call("follow", job_id, str(offset), patience_s=None):
            rest += chunk
            cut = rest.rfind(b"\n") + 1
            if cut:
                yield rest[:cut]
                rest = rest[cut:]

    def _ask(self, verb: str, *args: str, stdin: Stdin = nothing) -> Any:
        reply = b"".join(self._call(verb, *args, stdin=stdin))
        try:
            return json.loads(reply)
        except ValueError as error:
            text = reply[:200].decode(errors="replace")
            raise RemoteError(f"host {self.name} answered {verb} with something else than JSON: {text!r}") from error

    def _call(
        self, verb: str, *args: str, stdin: Stdin = nothing, patience_s: float | None = PATIENCE_S
    ) -> Iterator[bytes]:
        way = self.transport
        argv = ["sh", "-c", CALL, "sh", way.root, bundle().digest, way.python, self.settings, verb, *args]
        try:
            self.calls += 1
            yield from way.stream(argv, stdin(), patience_s=patience_s)
            return
        except CommandFailed as failure:
            if failure.rc != NO_AGENT:
                raise _error(way, verb, failure) from failure
        self._install()
        try:
            self.calls += 1
            yield from way.stream(argv, stdin(), patience_s=patience_s)
        except CommandFailed as failure:
            raise _error(way, verb, failure) from failure

    def _install(self) -> None:
        content = bundle().packed()
        sha256 = hashlib.sha256(content).hexdigest()
        argv = ["sh", "-c", INSTALL, "sh", self.transport.root, bundle().digest, sha256]
        try:
            self.calls += 1
            b"".join(self.transport.stream(argv, [content], patience_s=PATIENCE_S))
        except CommandFailed as failure:
            raise RemoteError(
                f"the agent could not be put on host {self.name}: {failure.stderr.strip() or 'its checksum is wrong'}",
                next=f"see that {self.transport.root} is writable and the disk is not full",
            ) from failure


def _status(reply: Mapping[str, Any]) -> JobStatus:
    return JobStatus(reply["job_id"], reply["state"], reply["journal_bytes"], reply["rc"])


def _listed(reply: Mapping[str, Any]) -> HostJob:
    about = reply.get("name", ""), reply.get("kind", ""), reply.get("age_s")
    return HostJob(reply["job_id"], reply["state"], reply["journal_bytes"], reply["rc"], *about)


def _first_line(pieces: Iterator[bytes], most: int = 1000) -> tuple[bytes, bytes]:
    """Return the first line and what came after it in the same piece."""
    head = b""
    for piece in pieces:
        head += piece
        if b"\n" in head or len(head) > most:
            break
    line, _, rest = head.partition(b"\n")
    return line, rest


def _error(way: Transport, verb: str, failure: CommandFailed) -> DgxlabError:
    """Turn the agent's JSON line on stderr back into the error it was."""
    if failure.rc in NO_PYTHON:
        return _python(way, f"has no {way.python} that can be started")
    if failure.rc == OLD_PYTHON:
        return _python(way, f"has a {way.python} of version {failure.stderr.split()[-1]}")
    lines = failure.stderr.strip().splitlines()
    try:
        words = json.loads(lines[-1])
        return by_exit_code(words["exit_code"])(words["message"], next=words["next"], details=words["details"])
    except (ValueError, IndexError, KeyError, TypeError):
        last = lines[-1] if lines else "it said nothing"
        return RemoteError(
            f"the agent on host {way.name} failed at {verb} with exit status {failure.rc}: {last}",
            details=failure.stderr[-2000:],
        )


def _python(way: Transport, cause: str) -> RemoteError:
    return RemoteError(
        f"host {way.name} {cause}, and the agent needs Python 3.10 or newer",
        next=f"edit hosts.yaml: give {way.name} python: PATH, that of a newer one there",
    )
