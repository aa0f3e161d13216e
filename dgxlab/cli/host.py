"""dgxlab host: machines by name, whether they and what is said of them are trusted, what they have, what may go."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from dgxlab.cli._lab import connect, hosts_files, lab_if_any
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, agreed, table, typed
from dgxlab.errors import AGAIN, HostError, SpecError, UsageError, one_line

app = typer.Typer(help="Add, list, check and clean hosts.", no_args_is_help=True, rich_markup_mode=None)

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Trust the key without asking: you have compared it.")]


class Kind(StrEnum):
    """What can be removed from a host."""

    builds = "builds"
    models = "models"
    work = "work"
    jobs = "jobs"
    tools = "tools"
    agents = "agents"
    leftovers = "leftovers"


@app.command("add")
def add(
    destination: Annotated[str, typer.Argument(help="What ssh is given: an alias, user@host.", show_default=False)],
    name: Annotated[str | None, typer.Option("--name", help="What specs call it; the alias by default.")] = None,
    yes: YesOption = False,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Trust a host's key after a look at its fingerprint, sign in, and name it in your hosts.yaml.

    Example: dgxlab host add dgx
    """
    from dgxlab.spec.hosts import DESTINATION, add_host, load_hosts

    out, named = Out(format, quiet), name or destination
    if not DESTINATION.fullmatch(destination):
        raise UsageError(
            f"{destination!r} is nothing that ssh is given: an alias, user@host", next="dgxlab host add --help"
        )
    _check_name(named, destination)
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


@app.command("trust")
def trust(
    name: Annotated[str, typer.Argument(help="The host's name.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Consent without asking.")] = False,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Consent to what a project's hosts.yaml says of a host: which programs run, and with which settings.

    The consent is for the entry as it is now. Your own hosts.yaml needs none, and its entries win.

    Example: dgxlab host trust dgx
    """
    from dgxlab.spec.hosts import consent, look_up, to_consent

    out, own = Out(format, quiet), hosts_files()[0]
    entry = look_up(name, hosts_files())
    said = to_consent(entry, own)
    if said:
        Out().note("\n".join([f"{entry.file} says of {name}:", *(f"  {key}: {value}" for key, value in said.items())]))
        if not yes and not agreed("Use it so?"):
            raise UsageError("not trusted, nothing was written", next=AGAIN)
        consent(entry, own)
    shown = f"{name} may be used as {entry.file} says" if said else f"the entry of {name} needs no consent"
    out.result({"name": name, "file": entry.file, "consent": said}, shown)


@app.command("list")
def list_(format: FormatOption = Format.human, quiet: QuietOption = False) -> None:
    """List the hosts that hosts.yaml names.

    Example: dgxlab host list
    """
    from dgxlab.spec.hosts import load_hosts

    hosts = load_hosts(hosts_files()).values()
    rows = [{"name": host.name, "reached by": host.ssh or "this machine", "root": host.root} for host in hosts]
    Out(format, quiet).result(list(hosts), lambda: table(rows))


@app.command("check")
def check(
    name: Annotated[str, typer.Argument(help="The host's name.")] = "local",
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Show what a host has: machine, GPUs, tools, compilers.

    Example: dgxlab host check local
    """
    facts = connect(name).probe().facts
    Out(format, quiet).result(facts, lambda: "\n".join(facts_lines(facts)))


@app.command("clean")
def clean(
    name: Annotated[str, typer.Argument(help="The host's name.")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go and why the rest stays.")] = False,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", min=0, help="Keep what was used in the last so many days.")
    ] = 30,
    kind: Annotated[
        list[Kind] | None,
        typer.Option("--kind", metavar="KIND", help=f"Only {', '.join(Kind)}; may be given again."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Remove what lies unused; nothing measured is lost.

    Example: dgxlab host clean local --dry-run
    """
    from dgxlab.cli import _clean
    from dgxlab.lab import clean as use_case

    out = Out(format, quiet)
    with lab_if_any(db) as lab:
        host = connect(name)
        found = use_case.survey(lab, host, use_case.Policy(kind or list(Kind), older_than))
        hint = _clean.hint(found, name, kind or [], older_than)
        if dry_run:
            out.result(_clean.as_json(found), lambda: _clean.listing(found))
            out.note(hint)
            return
        asks = not yes and any(not candidate.kept for candidate in found)
        (Out() if asks else out).note(_clean.listing(found))  # whoever is asked sees what it is about
        out.note(hint)
        if asks and not agreed("Remove what goes?"):
            raise UsageError("nothing was removed", next=f"{typed()} --yes")
        cleaned = use_case.clean(lab, host, found, lambda event: out.note(str(event["note"])))
    out.result(cleaned, lambda: _clean.outcome(cleaned))


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
    """See that the host lets us in and runs a command: an entry is worth nothing before.

    Raises:
        HostError: if it does not.
    """
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


def _check_name(name: str, destination: str) -> None:
    from dgxlab.model import NAME

    if NAME.fullmatch(name):
        return
    bare = re.sub(r"^(ssh://)?([^@]*@)?", "", destination).partition(":")[0]  # of user@host, of ssh://user@host:port
    better = bare if NAME.fullmatch(bare) else "box"
    mend = shlex.join(["dgxlab", "host", "add", destination, "--name", better])
    raise UsageError(f"{name!r} is no name for a host", next=mend)


def facts_lines(facts: Any) -> list[str]:
    """Return what a host says of itself, for people."""
    details, toolchain = facts.details, facts.toolchain
    driver, disk, tools = details["driver"], details["disk"], details["tools"]
    gpus = [f"{gpu['name']}, {_mib(gpu.get('memory.total'))}" for gpu in details["gpus"]]
    rows = [
        ("host", f"{facts.hostname}, {details['os']}, kernel {details['kernel']}, user {details['user']}"),
        ("boot", facts.boot_id),
        ("cpu", f"{details['cpu']}, {details['cpus']} processors"),
        ("memory", f"{_mib(details['mem_available_mib'])} free of {_mib(details['memory_mib'])}"),
        ("disk", f"{_mib(disk['free_mib'])} free of {_mib(disk['total_mib'])} at {disk['path']}"),
        *(("gpu", gpu) for gpu in gpus or ["none"]),
        *([("driver", f"{driver['version']}, runs CUDA up to {driver['cuda'] or '?'}")] if gpus else []),
        *(("in use", _process(process)) for process in details["gpu_processes"]),
        ("cc", toolchain.cc or "missing"),
        ("c++", toolchain.cxx or "missing"),
        ("cmake", toolchain.cmake or "missing"),
        ("nvcc", f"{toolchain.nvcc}, {tools['nvcc']}" if toolchain.nvcc else "missing"),
        ("python", details["python"]),
        *((name, _tool(details, name)) for name in ("git", "ninja", "ccache")),
    ]
    return [f"{name:8}{one_line(value)}" for name, value in rows]


def _tool(details: Mapping[str, Any], name: str) -> str:
    path = details["tools"][name]
    return ", ".join(filter(None, (details["versions"].get(name), path))) if path else "missing"


def _mib(number: int | str | None) -> str:
    from dgxlab.units import size

    return size(int(text) << 20) if (text := str(number or "")).isdecimal() and len(text) < 15 else "?"


def _process(process: Mapping[str, Any]) -> str:
    return f"{process['program']} of {process['user'] or '?'}, pid {process['pid']}, {_mib(process['used_mib'])}"
