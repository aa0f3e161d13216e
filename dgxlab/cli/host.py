"""dgxlab host: machines by name, whether they are trusted, what they have, and what of it may go."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dgxlab.cli._lab import connect, hosts_files, lab_if_any
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, agreed, table
from dgxlab.errors import SpecError, UsageError
from dgxlab.units import size

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
    """Trust a host's key after a look at its fingerprint, and name it in your hosts.yaml.

    Example: dgxlab host add dgx
    """
    from dgxlab.model import NAME

    out = Out(format, quiet)
    named = name or destination
    if not NAME.fullmatch(named):
        raise UsageError(f"{named!r} is no name for a host", next=f"dgxlab host add {destination} --name NAME")
    _trust(destination, yes, out)
    path = _enter(named, destination)
    out.result({"name": named, "ssh": destination, "file": str(path)}, f"{named} is in {path}")


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
    Out(format, quiet).result(facts, lambda: "\n".join(_lines(facts)))


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
        if dry_run:
            out.result(_clean.as_json(found), lambda: _clean.listing(found))
            return
        out.note(_clean.listing(found))
        if any(not candidate.kept for candidate in found) and not yes and not agreed("Remove what goes?"):
            raise UsageError("nothing was removed", next=f"dgxlab host clean {name} --yes")
        cleaned = use_case.clean(lab, host, found, lambda event: out.note(str(event["note"])))
    out.result(cleaned, lambda: _clean.outcome(cleaned))


def _trust(destination: str, yes: bool, out: Out) -> None:
    """Ask about every hop on the way that is not trusted yet, until none is left."""
    from dgxlab.transport.ssh import fingerprint
    from dgxlab.transport.ssh_trust import NotTrusted, trust

    while (key := fingerprint(destination)).state != "trusted":
        if key.state != "unknown":
            raise NotTrusted(key, shlex.quote(destination))
        out.note(f"{key.destination} shows {key.keytype} {key.fingerprint}")
        if not yes and not agreed("Is that its key?"):
            raise UsageError("not trusted, nothing was written", next=f"dgxlab host add {destination}, and say yes")
        out.note(f"trusted in {trust(key)}")


def _enter(name: str, destination: str) -> Path:
    """Write an entry into the user's hosts.yaml, unless the name stands for this destination already."""
    from dgxlab.spec.hosts import load_hosts

    path = hosts_files()[1]
    known = load_hosts(hosts_files()).get(name)
    if known and known.ssh != destination:
        raise SpecError(f"{name} is another host already: {known.ssh or 'this machine'}", next="give another --name")
    if known is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        quoted = re.sub(r'(["\\])', r"\\\1", destination)
        with path.open("a") as file:
            file.write(f'{name}: {{ssh: "{quoted}"}}\n')
    return path


def _lines(facts: Any) -> list[str]:
    details, toolchain = facts.details, facts.toolchain
    driver, disk, tools = details["driver"], details["disk"], details["tools"]
    gpus = [f"{gpu['name']}, {_mib(gpu['memory.total'])}" for gpu in details["gpus"]]
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
        *((name, tools[name] or "missing") for name in ("git", "ninja", "ccache")),
    ]
    return [f"{name:8}{value}" for name, value in rows]


def _mib(number: int | str | None) -> str:
    return size(int(number) << 20) if number else "?"


def _process(process: Mapping[str, Any]) -> str:
    return f"{process['program']} of {process['user'] or '?'}, pid {process['pid']}, {_mib(process['used_mib'])}"
