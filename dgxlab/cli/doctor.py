"""dgxlab doctor: what is missing, and the command that mends it."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from dgxlab.cli._lab import connect, database, hosts_files
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, as_typed, plural
from dgxlab.errors import CheckFailed, DgxlabError, SpecError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dgxlab.lab.doctor import Finding
    from dgxlab.model import HostEntry


def doctor(
    name: Annotated[str, typer.Argument(help="The host to look at as well.")] = "local",
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Say what is missing here and on a host, and what mends it.

    Example: dgxlab doctor local
    """
    from dgxlab.lab.doctor import MISSING, look_at_client
    from dgxlab.source import default_path

    hosts = _hosts()
    findings = look_at_client(database(db), default_path(), hosts)
    if not isinstance(hosts, DgxlabError):
        findings += _host(name)
    findings = [replace(finding, next=as_typed(finding.next)) for finding in findings]
    Out(format, quiet).result(findings, lambda: _shown(findings))
    if missing := [finding for finding in findings if finding.state == MISSING]:
        raise CheckFailed(f"{plural(len(missing), 'thing')} missing", next=missing[0].next)


def _hosts() -> Mapping[str, HostEntry] | DgxlabError:
    from dgxlab.spec.hosts import load_hosts

    try:
        return load_hosts(hosts_files())
    except SpecError as error:
        return error


def _host(name: str) -> list[Finding]:
    from dgxlab.lab.doctor import MISSING, Finding, look_at_host

    try:
        return look_at_host(connect(name))
    except DgxlabError as error:  # there is none of that name
        return [Finding(name, "reach", MISSING, error.message, error.next)]


def _shown(findings: Sequence[Finding]) -> str:
    """Return a line for each finding below its machine's name, and what mends it on the next."""
    lines = []
    for where, found in groupby(findings, lambda finding: finding.where):
        lines.append(where)
        for finding in found:
            lines.append(f"  {finding.state:9}{finding.name:8}{one_line(finding.text)}")
            lines += [f"{'':19}next: {one_line(finding.next)}"] if finding.next else []
    return "\n".join(lines)
