"""dgxlab host: machines by name, and whether they are trusted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from dgxlab.cli._lab import connect, hosts_files
from dgxlab.cli._options import Format, FormatOption, QuietOption
from dgxlab.cli._out import Out
from dgxlab.errors import SpecError, UsageError

app = typer.Typer(help="Add, list and check hosts.", no_args_is_help=True, rich_markup_mode=None)

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Trust the key without asking: you have compared it.")]


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
    Out(format, quiet).result(
        list(hosts), lambda: "\n".join(f"{host.name}: {host.ssh or 'this machine'}, {host.root}" for host in hosts)
    )


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


def _trust(destination: str, yes: bool, out: Out) -> None:
    """Ask about every hop on the way that is not trusted yet, until none is left."""
    from dgxlab.transport.ssh import fingerprint
    from dgxlab.transport.ssh_trust import NotTrusted, trust

    while (key := fingerprint(destination)).state != "trusted":
        if key.state != "unknown":
            raise NotTrusted(key, shlex.quote(destination))
        out.note(f"{key.destination} shows {key.keytype} {key.fingerprint}")
        if not yes and not _agreed():
            raise UsageError("not trusted, nothing was written", next=f"dgxlab host add {destination}, and say yes")
        out.note(f"trusted in {trust(key)}")


def _agreed() -> bool:
    try:
        return typer.confirm("Is that its key?", err=True)
    except typer.Abort:  # no terminal to answer on, or Ctrl-C
        return False


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
    gpus = [
        f"{gpu['name']}, {gpu['memory.total'] or '?'} MiB, driver {gpu['driver_version']}" for gpu in details["gpus"]
    ]
    rows = {
        "host": f"{facts.hostname}, {details['os']}, kernel {details['kernel']}, user {details['user']}",
        "cpu": f"{details['cpu']}, {details['cpus']} processors, {details['memory_mib']} MiB",
        "gpu": "; ".join(gpus) or "none",
        "cc": toolchain.cc or "missing",
        "c++": toolchain.cxx or "missing",
        "cmake": toolchain.cmake or "missing",
        "nvcc": toolchain.nvcc or "missing",
        "python": details["python"],
        **{name: path or "missing" for name, path in details["tools"].items() if name in ("git", "ninja", "ccache")},
    }
    return [f"{name:8}{value}" for name, value in rows.items()]
