"""dgxlab host, doctor: machines by name, their trust, their tools and missing ones, and cleaning."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import App, Workspace, connect
from dgxlab.cli._out import Out, agreed, as_typed, plural, table, typed
from dgxlab.errors import AGAIN, CheckFailed, DgxlabError, HostError, SpecError, UsageError, one_line
from dgxlab.project import hosts_files
from dgxlab.units import size

if TYPE_CHECKING:
    from dgxlab.lab.clean import Candidate
    from dgxlab.lab.doctor import Finding

app = App("Add, list, check and clean hosts.")

_NameArgument = Annotated[str, Argument(help="The host's name.", autocompletion=_complete.hosts)]

Kind = StrEnum("Kind", ["builds", "models", "work", "jobs", "tools", "agents", "leftovers"])
"""What can be removed from a host."""
KINDS = f"Only {', '.join(Kind)}; may be given again."


@app.add
def add(
    destination: str = Argument(help="What ssh is given: an alias, user@host."),
    name: str | None = Option(None, help="What specs call it; the alias by default."),
    yes: bool = Option(False, "--yes", "-y", help="Trust the key without asking: you have compared it."),
    *,
    out: Out,
) -> None:
    """Trust a host's key, sign in, and name it in your hosts.yaml.

    You see the fingerprint and are asked first.

    Example: dgxlab host add dgx
    """
    from dgxlab.model import NAME
    from dgxlab.spec.hosts import DESTINATION, add_host, load_hosts

    named = name or destination
    if not DESTINATION.fullmatch(destination):
        message = f"{destination!r} is no ssh destination, such as an alias or user@host"
        raise UsageError(message, next="dgxlab host add --help")
    if not NAME.fullmatch(named):
        bare = re.sub(r"^(ssh://)?([^@]*@)?", "", destination).partition(":")[0]  # user@host, ssh://user@host:port
        better = bare if NAME.fullmatch(bare) else "box"
        mend = shlex.join(["dgxlab", "host", "add", destination, "--name", better])
        raise UsageError(f"{named!r} is no name for a host", next=mend)
    known = load_hosts(hosts_files()).get(named)
    if known and known.ssh != destination:
        what = known.ssh or "this machine"
        raise SpecError(f"{named} is another host already: {what}; give another --name", next="dgxlab host list")
    _trust_keys(destination, yes, out)
    _sign_in(named, destination)
    path = known.file if known else str(hosts_files()[0])
    if known is None:
        add_host(hosts_files()[0], named, destination)
    out.result({"name": named, "ssh": destination, "file": path}, f"{named} lets us in and is in {path}")


@app.add
def trust(
    name: _NameArgument, yes: bool = Option(False, "--yes", "-y", help="Consent without asking."), *, out: Out
) -> None:
    """Consent to a host's entry in a project's hosts.yaml.

    The entry decides which programs run there, and with which settings.

    The consent covers the current entry only. Your own hosts.yaml needs no consent, and its entries take precedence.

    Example: dgxlab host trust dgx
    """
    from dgxlab.spec.hosts import consent, look_up, to_consent

    own = hosts_files()[0]
    entry = look_up(name, hosts_files())
    settings = to_consent(entry, own)
    if settings:
        lines = [f"{entry.file} says of {name}:", *(f"  {key}: {value}" for key, value in settings.items())]
        Out().note("\n".join(lines))
        if not yes and not agreed("Use it so?"):
            raise UsageError("not trusted, nothing was written", next=AGAIN)
        consent(entry, own)
    shown = f"{name} may be used as {entry.file} says" if settings else f"the entry of {name} needs no consent"
    out.result({"name": name, "file": entry.file, "consent": settings}, shown)


@app.add
def list_(*, out: Out) -> None:
    """List the hosts that hosts.yaml names.

    Example: dgxlab host list
    """
    from dgxlab.spec.hosts import load_hosts

    hosts = load_hosts(hosts_files()).values()
    rows = [{"name": host.name, "reached by": host.ssh or "this machine", "root": host.root} for host in hosts]
    out.result(list(hosts), lambda: table(rows))


@app.add
def check(name: _NameArgument = "local", *, out: Out) -> None:
    """Show what a host has: machine, GPUs, tools, compilers.

    Example: dgxlab host check local
    """
    from dgxlab.lab.doctor import check_facts

    host = connect(name)
    probe = host.probe()
    out.result(probe.facts, lambda: "\n".join(map(_line, check_facts(probe.facts, host.entry, probe.absent))))


@app.add
def clean(
    name: _NameArgument = "local",
    dry_run: bool = Option(False, "--dry-run", help="Only list what would go and why the rest stays."),
    older_than: float = Option(30, metavar="DAYS", min=0, help="Keep what was used in the last so many days."),
    kind: list[Kind] | None = Option(None, metavar="KIND", help=KINDS),
    yes: bool = Option(False, "--yes", "-y", help="Remove without asking."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Remove unused builds, folders and jobs; no measurement is lost.

    Example: dgxlab host clean local --dry-run
    """
    from dgxlab.cli._display import notes
    from dgxlab.lab import clean as use_case

    with workspace.lab_if_any() as lab:
        host = connect(name)
        candidates = use_case.survey(lab, host, kind or list(Kind), older_than)
        if dry_run:
            flat = [{**vars(each.item), "goes": not each.kept, "kept": each.kept} for each in candidates]
            out.result(flat, lambda: as_typed(_listing(candidates)))
            return
        asks = not yes and any(not candidate.kept for candidate in candidates)
        (Out() if asks else out).note(_listing(candidates))  # a question needs the list
        if asks and not agreed("Remove what goes?"):
            raise UsageError("nothing was removed", next=f"{typed()} --yes")
        cleaned = use_case.clean(lab, host, candidates, notes(out))
    lines = [one_line(f"{each.item.kind} {each.item.name} stays: {each.kept}") for each in cleaned.kept]
    freed = size(sum(item.bytes for item in cleaned.removed))
    removed = f"removed {plural(len(cleaned.removed), 'thing')}, {freed}" if cleaned.removed else "nothing removed"
    out.result(cleaned, "\n".join([*lines, removed]))


def doctor(
    name: str = Argument("local", help="The host to look at as well.", autocompletion=_complete.hosts),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Show what is missing here and on a host, and how to fix it.

    Example: dgxlab doctor local
    """
    from dgxlab.lab.doctor import MISSING, Finding, check_client, check_host
    from dgxlab.source import cache_path

    findings = [*check_client(workspace.database, cache_path(), hosts_files())]
    if not any(each.name == "hosts" and each.state == MISSING for each in findings):
        try:
            findings += check_host(connect(name))
        except DgxlabError as error:  # no host of that name
            findings.append(Finding("reach", MISSING, error.message, error.next, where=name))
    findings = [replace(finding, next=as_typed(finding.next)) for finding in findings]
    lines = []
    for where, group in groupby(findings, lambda finding: finding.where):
        lines.append(where)
        for finding in group:
            lines.append(f"  {_line(finding)}")
            lines += [f"{'':19}next: {one_line(finding.next)}"] if finding.next else []
    out.result(findings, "\n".join(lines))
    if missing := [finding for finding in findings if finding.state == MISSING]:
        raise CheckFailed(f"{plural(len(missing), 'thing')} missing", next=missing[0].next)


def _line(finding: Finding) -> str:
    return f"{finding.state:9}{finding.name:8}{one_line(finding.text)}"


def _trust_keys(destination: str, yes: bool, out: Out) -> None:
    """Ask about the key of every untrusted hop on the way to a host."""
    from dgxlab.transport.ssh import host_key
    from dgxlab.transport.ssh_trust import NotTrusted, trust

    asked = False
    while (key := host_key(destination)).state != "trusted":
        if key.state != "unknown":
            raise NotTrusted(key, shlex.quote(destination))
        out.note(f"{key.destination} shows {key.keytype} {key.fingerprint}")
        if not yes and not agreed("Is that its key?"):
            raise UsageError("not trusted, nothing was written", next=AGAIN)
        out.note(f"trusted in {trust(key)}")
        asked = True
    if not asked and key.line:
        out.note(f"{key.destination} shows {key.keytype} {key.fingerprint}, known from {key.line.place}")


def _sign_in(name: str, destination: str) -> None:
    """Check that we can log in and run a command, before an entry is written."""
    from dgxlab.transport.base import CommandFailed
    from dgxlab.transport.ssh import SshTransport

    way = SshTransport(name, destination)
    try:
        b"".join(way.stream(["true"], patience_s=30.0))
    except CommandFailed as failure:
        mend = f"ssh -o BatchMode=yes {shlex.quote(destination)} true"
        raise HostError(f"{destination} lets us in but runs no commands: {failure}", next=mend) from failure
    finally:
        way.close()


def _listing(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "there is nothing to remove"
    rows = []
    for candidate in candidates:
        item = candidate.item
        used = time.strftime("%Y-%m-%d", time.localtime(time.time() - item.age_s))
        action = f"stays: {candidate.kept}" if candidate.kept else "goes"
        row = {"kind": item.kind, "name": item.name, "last used": used, "size": size(item.bytes)}
        rows.append({**row, "action": action})
    goes = [candidate.item.bytes for candidate in candidates if not candidate.kept]
    stays = sum(candidate.item.bytes for candidate in candidates if candidate.kept)
    return f"{table(rows, right=('size',))}\n{len(goes)} of {len(rows)} go, {size(sum(goes))}; {size(stays)} stay"
