"""A host as the client sees it: the agent's verbs as methods, whatever the transport."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgxlab.errors import DgxlabError, RemoteError, by_exit_code
from dgxlab.model import Facts, HostEntry, Plan, canonical, from_json
from dgxlab.transport.base import CommandFailed, Transport
from dgxlab.transport.bundle import bundle

NO_AGENT = 97
"""Exit status by which the host says that this version of the agent is not there yet."""

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
class Probe:
    """The host's answer to a first question."""

    facts: Facts
    missing: tuple[str, ...]
    models: Mapping[str, Mapping[str, Any] | None]


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

    def probe(self, commits: Sequence[str] = (), models: Sequence[str] = ()) -> Probe:
        """Ask for facts, and which commits and model files are there, in one round trip."""
        reply = self._ask("probe", canonical({"commits": commits, "models": models}))
        return Probe(from_json(Facts, reply["facts"]), tuple(reply["missing"]), reply["models"])

    def send_objects(self, commit: str, shallow: Sequence[str], pack: Stdin) -> None:
        """Send a pack that completes `commit`."""
        header = canonical({"commit": commit, "shallow": list(shallow)}).encode() + b"\n"

        def body() -> Iterator[bytes]:
            yield header
            yield from pack()

        b"".join(self._call("receive", stdin=body))

    def submit(self, plan: Plan) -> JobStatus:
        """Stage and start a job; safe to repeat, it runs at most once."""
        content = canonical(plan).encode()
        return _status(self._ask("submit", plan.job_id, hashlib.sha256(content).hexdigest(), stdin=lambda: [content]))

    def status(self, job_id: str) -> JobStatus:
        """Ask for a job's state."""
        return _status(self._ask("status", job_id))

    def jobs(self) -> list[JobStatus]:
        """Ask for every job on the host, oldest first."""
        return [_status(reply) for reply in self._ask("jobs")]

    def cancel(self, job_id: str) -> JobStatus:
        """End a job and see that it is gone."""
        return _status(self._ask("cancel", job_id))

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
                raise _error(self.name, verb, failure) from failure
        self._install()
        try:
            self.calls += 1
            yield from way.stream(argv, stdin(), patience_s=patience_s)
        except CommandFailed as failure:
            raise _error(self.name, verb, failure) from failure

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


def _error(host: str, verb: str, failure: CommandFailed) -> DgxlabError:
    """Turn the agent's JSON line on stderr back into the error it was."""
    lines = failure.stderr.strip().splitlines()
    try:
        words = json.loads(lines[-1])
        return by_exit_code(words["exit_code"])(words["message"], next=words["next"], details=words["details"])
    except (ValueError, IndexError, KeyError, TypeError):
        last = lines[-1] if lines else "it said nothing"
        return RemoteError(
            f"the agent on host {host} failed at {verb} with exit status {failure.rc}: {last}",
            details=failure.stderr[-2000:],
        )
