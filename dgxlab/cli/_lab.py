"""Where the commands find the project, its database, the pins and the hosts."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab.errors import SpecError, UsageError, command
from dgxlab.project import MARKER, is_marked, root, spec_at, specs

if TYPE_CHECKING:
    from dgxlab.lab import Lab
    from dgxlab.model import Experiment
    from dgxlab.store import Store
    from dgxlab.transport.host import Host


def database(db: Path | None, project: Path | None = None) -> Path:
    """Return the database's path: the one given, else results.db of that project or of the current folder's."""
    return db or (project or root()) / "results.db"


def where(db: Path | None, project: Path | None = None) -> str:
    """Say which project and record a command is about; from a folder that is not marked it may be another one."""
    folder = project or root()
    guessed = "" if is_marked(folder) else f" (guessed; mark it with: {command('touch', folder / MARKER)})"
    return f"project {folder}{guessed}, record {database(db, folder).absolute()}"


def experiment(spec: str, overrides: Sequence[str] = (), host: str | None = None) -> Experiment:
    """Read the spec of that path, or of that name anywhere below the project's experiments/.

    Raises:
        SpecError: if anything is wrong with it; never without the command that looks at it again.
    """
    from dgxlab.spec import load

    path = _spec_file(spec)
    try:
        return load(path, overrides, host)
    except SpecError as error:
        error.next = error.next or shlex.join(
            ["dgxlab", "plan", str(path)] if path.is_file() else ["ls", str(path.parent)]
        )
        raise


def _spec_file(spec: str) -> Path:
    """Return the file that a path or a name stands for.

    Raises:
        SpecError: if no experiment of the project has that name, or more than one has.
    """
    path = Path(spec)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return spec_at(path)
    from dgxlab.spec.resolve import label

    known = specs(root())
    if named := [label(file) for file in known.get(spec, [])]:
        if len(named) > 1:
            raise SpecError(f"{' and '.join(named)} share a name", next=command("dgxlab", "plan", named[0]))
        return Path(named[0])
    if path.exists():  # a folder, for one: the reader knows the words for it
        return path
    folder = label(root() / "experiments")
    near = difflib.get_close_matches(spec, known, n=1)
    raise SpecError(
        f"{folder} has no experiment {spec!r}" + (f"; there is {near[0]!r}" if near else ""),
        next=command("ls", "-R", folder),
    )


@contextmanager
def store(db: Path | None, *, create: bool = False, project: Path | None = None) -> Iterator[Store]:
    """Open the database for one command."""
    from dgxlab.store import Store

    opened = Store.open(database(db, project), create=create)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def lab(
    db: Path | None, *, create: bool = False, project: Path | None = None, trust_source: bool = False
) -> Iterator[Lab]:
    """Open everything that a use case needs."""
    from dgxlab.lab import Lab
    from dgxlab.source import PinCache, default_path

    with store(db, create=create, project=project) as opened:
        yield Lab(opened, PinCache(default_path(), trusted=trust_source), connect)


@contextmanager
def lab_if_any(db: Path | None) -> Iterator[Lab | None]:
    """Open everything, or nothing where no database was named and the project has none."""
    if db is None and not database(db).exists():
        yield None
        return
    with lab(db) as opened:
        yield opened


def hosts_files() -> tuple[Path, Path]:
    """Return where hosts.yaml is looked for: the user's own, then the project's."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "dgxlab" / "hosts.yaml", root() / "hosts.yaml"


def elsewhere() -> str:
    """Return the command that lists the jobs of a host, for one that the record does not know: the first over ssh."""
    from dgxlab.spec.hosts import load_hosts

    hosts = load_hosts(hosts_files()).values()
    return f"dgxlab jobs --host {next((host.name for host in hosts if host.ssh), 'local')}"


@contextmanager
def naming_a_host(instead: str = "") -> Iterator[None]:
    """Send who asked for a job that the record does not know to a host's list.

    Args:
        instead: The `next` that is to name the host.
    """
    try:
        yield
    except UsageError as error:
        error.next = elsewhere() if error.next == instead else error.next
        raise


def connect(name: str) -> Host:
    """Return the host of that name; nothing is sent yet.

    Raises:
        SpecError: if hosts.yaml does not name it, or is wrong.
        HostError: if a project's entry needs a consent that the user has not given.
    """
    from dgxlab.spec.hosts import find_host
    from dgxlab.transport.host import Host
    from dgxlab.transport.local import LocalTransport

    entry = find_host(name, hosts_files())
    if not entry.ssh:
        return Host(LocalTransport(entry.root, name, entry.python), entry)
    from dgxlab.transport.ssh import SshTransport

    return Host(SshTransport(name, entry.ssh, entry.root, entry.python or "python3"), entry)
