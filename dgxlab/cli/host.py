"""dgxlab host, doctor: machines by name, whether they are trusted, what they have and lack, what may go."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._app import App, Desk, connect, hosts_files
from dgxlab.cli._out import Out, agreed, as_typed, plural, table, typed
from dgxlab.errors import AGAIN, CheckFailed, DgxlabError, HostError, SpecError, UsageError, one_line
from dgxlab.units import size

if TYPE_CHECKING:
    from dgxlab.lab.clean import Candidate
    from dgxlab.lab.doctor import Finding
    from dgxlab.model import HostEntry
    from dgxlab.replies import Item

app = App("Add, list, check and clean hosts.")

NameArgument = Annotated[str, typer.Argument(help="The host's name.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Trust the key without asking: you have compared it.")]


Kind = StrEnum("Kind", ["builds", "models", "work", "jobs", "tools", "agents", "leftovers"])
"""What can be removed from a host."""


@app.add("add")
def add(
    destination: Annotated[str, typer.Argument(help="What ssh is given: an alias, user@host.", show_default=False)],
    name: Annotated[str | None, typer.Option("--name", help="What specs call it; the alias by default.")] = None,
    yes: YesOption = False,
    *,
    out: Out,
) -> None:
    """Trust a host's key after a look at its fingerprint, sign in, and name it in your hosts.yaml.

    Example: dgxlab host add dgx
    """
    from dgxlab.model import NAME
    from dgxlab.spec.hosts import DESTINATION, add_host, load_hosts

    named = name or destination
    if not DESTINATION.fullmatch(destination):
        raise UsageError(
            f"{destination!r} is nothing that ssh is given: an alias, user@host", next="dgxlab host add --help"
        )
    if not NAME.fullmatch(named):
        bare = re.sub(r"^(ssh://)?([^@]*@)?", "", destination).partition(":")[0]  # of user@host, ssh://user@host:port
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


@app.add("trust")
def trust(
    name: Annotated[str, typer.Argument(help="The host's name.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Consent without asking.")] = False,
    *,
    out: Out,
) -> None:
    """Consent to what a project's hosts.yaml says of a host: which programs run, and with which settings.

    The consent is for the entry as it is now. Your own hosts.yaml needs none, and its entries win.

    Example: dgxlab host trust dgx
    """
    from dgxlab.spec.hosts import consent, look_up, to_consent

    own = hosts_files()[0]
    entry = look_up(name, hosts_files())
    settings = to_consent(entry, own)
    if settings:
        lines = [f"  {key}: {value}" for key, value in settings.items()]
        Out().note("\n".join([f"{entry.file} says of {name}:", *lines]))
        if not yes and not agreed("Use it so?"):
            raise UsageError("not trusted, nothing was written", next=AGAIN)
        consent(entry, own)
    shown = f"{name} may be used as {entry.file} says" if settings else f"the entry of {name} needs no consent"
    out.result({"name": name, "file": entry.file, "consent": settings}, shown)


@app.add("list")
def list_(*, out: Out) -> None:
    """List the hosts that hosts.yaml names.

    Example: dgxlab host list
    """
    from dgxlab.spec.hosts import load_hosts

    hosts = load_hosts(hosts_files()).values()
    rows = [{"name": host.name, "reached by": host.ssh or "this machine", "root": host.root} for host in hosts]
    out.result(list(hosts), lambda: table(rows))


@app.add("check")
def check(name: NameArgument = "local", *, out: Out) -> None:
    """Show what a host has: machine, GPUs, tools, compilers.

    Example: dgxlab host check local
    """
    facts = connect(name).probe().facts
    out.result(facts, lambda: "\n".join(facts_lines(facts)))


@app.add("clean")
def clean(
    name: NameArgument = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go and why the rest stays.")] = False,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", min=0, help="Keep what was used in the last so many days.")
    ] = 30,
    kind: Annotated[
        list[Kind] | None,
        typer.Option("--kind", metavar="KIND", help=f"Only {', '.join(Kind)}; may be given again."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Remove what lies unused; nothing measured is lost.

    Example: dgxlab host clean local --dry-run
    """
    from dgxlab.lab import clean as use_case

    with desk.lab_if_any() as lab:
        host = connect(name)
        candidates = use_case.survey(lab, host, kind or list(Kind), older_than)
        hint = _hint(candidates, name, kind or [], older_than)
        if dry_run:
            flat = [{**vars(each.item), "goes": not each.kept, "kept": each.kept} for each in candidates]
            out.result(flat, lambda: _listing(candidates))
            out.note(hint)
            return
        asks = not yes and any(not candidate.kept for candidate in candidates)
        (Out() if asks else out).note(_listing(candidates))  # a question shows what it is about
        out.note(hint)
        if asks and not agreed("Remove what goes?"):
            raise UsageError("nothing was removed", next=f"{typed()} --yes")
        cleaned = use_case.clean(lab, host, candidates, lambda event: out.note(getattr(event, "note", "")))
    lines = [one_line(f"{each.item.kind} {each.item.name} stays: {each.kept}") for each in cleaned.kept]
    lines.append(f"removed {plural(len(cleaned.removed), 'thing')}, {_total(cleaned.removed)}")
    out.result(cleaned, "\n".join(lines))


def doctor(
    name: Annotated[str, typer.Argument(help="The host to look at as well.")] = "local",
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Say what is missing here and on a host, and what mends it.

    Example: dgxlab doctor local
    """
    from dgxlab.lab.doctor import MISSING, Finding, look_at_client, look_at_host
    from dgxlab.source import default_path
    from dgxlab.spec.hosts import load_hosts

    hosts: Mapping[str, HostEntry] | DgxlabError
    try:
        hosts = load_hosts(hosts_files())
    except SpecError as error:
        hosts = error
    findings = look_at_client(desk.database, default_path(), hosts)
    if not isinstance(hosts, DgxlabError):
        try:
            findings += look_at_host(connect(name))
        except DgxlabError as error:  # there is none of that name
            findings.append(Finding(name, "reach", MISSING, error.message, error.next))
    findings = [replace(finding, next=as_typed(finding.next)) for finding in findings]
    out.result(findings, lambda: _findings(findings))
    if missing := [finding for finding in findings if finding.state == MISSING]:
        raise CheckFailed(f"{plural(len(missing), 'thing')} missing", next=missing[0].next)


def facts_lines(facts: Any) -> list[str]:
    """Return what a host says of itself, for people."""
    details, toolchain = facts.details, facts.toolchain
    driver, disk, tools, versions = (details[key] for key in ("driver", "disk", "tools", "versions"))
    processes = [
        f"{process['program']} of {process['user'] or '?'}, pid {process['pid']}, {_mib(process['used_mib'])}"
        for process in details["gpu_processes"]
    ]
    gpus = [f"{gpu['name']}, {_mib(gpu.get('memory.total'))}" for gpu in details["gpus"]]
    rows = [
        ("host", f"{facts.hostname}, {details['os']}, kernel {details['kernel']}, user {details['user']}"),
        ("boot", facts.boot_id),
        ("cpu", f"{details['cpu']}, {details['cpus']} processors"),
        ("memory", f"{_mib(details['mem_available_mib'])} free of {_mib(details['memory_mib'])}"),
        ("disk", f"{_mib(disk['free_mib'])} free of {_mib(disk['total_mib'])} at {disk['path']}"),
        *(("gpu", gpu) for gpu in gpus or ["none"]),
        *([("driver", f"{driver['version']}, runs CUDA up to {driver['cuda'] or '?'}")] if gpus else []),
        *(("in use", process) for process in processes),
        ("cc", toolchain.cc or "missing"),
        ("c++", toolchain.cxx or "missing"),
        ("cmake", toolchain.cmake or "missing"),
        ("nvcc", f"{toolchain.nvcc}, {tools['nvcc']}" if toolchain.nvcc else "missing"),
        ("python", details["python"]),
    ]
    for name in ("git", "ninja", "ccache"):
        path = tools[name]
        rows.append((name, ", ".join(filter(None, (versions.get(name), path))) if path else "missing"))
    return [f"{name:8}{one_line(value)}" for name, value in rows]


def _trust_keys(destination: str, yes: bool, out: Out) -> None:
    """Ask about every hop on the way that is not trusted yet, until none is left."""
    from dgxlab.transport.ssh import fingerprint
    from dgxlab.transport.ssh_trust import NotTrusted, trust

    asked = False
    while (key := fingerprint(destination)).state != "trusted":
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
    """See that the host lets us in and runs a command: an entry is worth nothing before."""
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


def _mib(number: int | str | None) -> str:
    return size(int(text) << 20) if (text := str(number or "")).isdecimal() and len(text) < 15 else "?"


def _findings(findings: Sequence[Finding]) -> str:
    lines = []
    for where, group in groupby(findings, lambda finding: finding.where):
        lines.append(where)
        for finding in group:
            lines.append(f"  {finding.state:9}{finding.name:8}{one_line(finding.text)}")
            lines += [f"{'':19}next: {one_line(finding.next)}"] if finding.next else []
    return "\n".join(lines)


def _listing(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "nothing lies there"
    goes = [candidate.item for candidate in candidates if not candidate.kept]
    stays = [candidate.item for candidate in candidates if candidate.kept]
    rows = [
        {
            "kind": candidate.item.kind,
            "name": candidate.item.name,
            "last used": time.strftime("%Y-%m-%d", time.localtime(time.time() - candidate.item.age_s)),
            "size": size(candidate.item.bytes),
            "what becomes of it": f"stays: {candidate.kept}" if candidate.kept else "goes",
        }
        for candidate in candidates
    ]
    return f"{table(rows, right=('size',))}\n{len(goes)} of {len(rows)} go, {_total(goes)}; {_total(stays)} stay"


def _hint(candidates: Sequence[Candidate], host: str, kinds: Sequence[str], days: float) -> str:
    """Return what to say where nothing goes and things stay only because they were used lately, "" elsewhere."""
    if any(not candidate.kept for candidate in candidates) or not any(candidate.recent for candidate in candidates):
        return ""
    words = ["dgxlab", "host", "clean", host, *(word for kind in kinds for word in ("--kind", kind))]
    command = shlex.join([*words, "--older-than", "0", "--dry-run"])
    return f"nothing goes, for all that may go was used in the last {days:g} days; to see it: {command}"


def _total(items: Iterable[Item]) -> str:
    return size(sum(item.bytes for item in items))
