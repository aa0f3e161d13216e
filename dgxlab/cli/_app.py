"""What the commands share: options, and where the project, its record, its experiments and the hosts are."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dgxlab.cli._out import Format, Out
from dgxlab.errors import SpecError, UsageError, command
from dgxlab.project import MARKER, is_marked, root, spec_at, specs

if TYPE_CHECKING:
    from dgxlab.lab import Lab
    from dgxlab.model import Experiment
    from dgxlab.store import Store
    from dgxlab.transport.host import Host

Command = TypeVar("Command", bound=Callable[..., None])


Word = StrEnum("Word", ["faster", "slower", "same", "inconclusive", "invalid"])
"""What a chain may say."""

Same = StrEnum("Same", ["matrix", "models", "session", "host"])
"""What both arms of a session must have alike."""

DbOption = Annotated[
    Path | None,
    typer.Option("--db", envvar="DGXLAB_DB", help="The database; results.db of this project by default."),
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr, only errors.")]
HostOption = Annotated[str | None, typer.Option("--host", help="Run on this host instead of the spec's.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the spec; may be given again."),
]
TrustSourceOption = Annotated[
    bool, typer.Option("--trust-source", help="Fetch from a package that dgxlab does not know the digest of.")
]
FailOnOption = Annotated[
    list[Word] | None,
    typer.Option("--fail-on", help="Exit with 11 where this is a verdict; may be given again."),
]
AllowOption = Annotated[
    list[Same] | None,
    typer.Option("--allow", help="Compare arms that differ in this too; may be given again."),
]
WaitOption = Annotated[
    int,
    typer.Option("--wait", metavar="MINUTES", min=0, help="Wait so long for a device that others use; 0: not at all."),
]
MaxMinutesOption = Annotated[
    float | None,
    typer.Option(
        "--max-minutes",
        metavar="MINUTES",
        help="Let the chains take so long at most, builds and gates left out: fewer cycles then, and a larger MDE.",
        show_default=False,
    ),
]
SpecArgument = Annotated[
    str, typer.Argument(help="The experiment's YAML file, or its name in experiments/.", show_default=False)
]
WideOption = Annotated[bool, typer.Option("--wide", help="Show every column, and each run and cycle left out.")]
JOB = "its id, enough of its beginning, or its last six characters"
JobArgument = Annotated[str, typer.Argument(help=f"A job: {JOB}.", show_default=False)]

SHARED: dict[str, list[tuple[str, Any, Any]]] = {
    "desk": [("db", DbOption, None)],
    "out": [("format", FormatOption, Format.human), ("quiet", QuietOption, False)],
}
"""The options of every command, with their defaults, by the parameter that a command's function has for them. They may
also be given before the command."""


@dataclass(frozen=True)
class Desk:
    """Where a command works."""

    db: Path | None = None
    """None for results.db of the project."""
    project: Path | None = None
    """Its folder; None for that of the current folder."""
    trust_source: bool = False
    """Whether a pin may come from a package of which no digest is known."""

    @property
    def database(self) -> Path:
        """Path of the record."""
        return self.db or (self.project or root()) / "results.db"

    @property
    def where(self) -> str:
        """Which project and record a command is about; from a folder that is not marked it may be another one."""
        folder = self.project or root()
        guessed = "" if is_marked(folder) else f" (guessed; mark it with: {command('touch', folder / MARKER)})"
        return f"project {folder}{guessed}, record {self.database.absolute()}"

    @contextmanager
    def store(self, *, create: bool = False) -> Iterator[Store]:
        """Open the record."""
        from dgxlab.store import Store

        opened = Store.open(self.database, create=create)
        try:
            yield opened
        finally:
            opened.close()

    @contextmanager
    def lab(self, *, create: bool = False) -> Iterator[Lab]:
        """Open everything that a use case needs."""
        from dgxlab.lab import Lab
        from dgxlab.source import PinCache, default_path

        with self.store(create=create) as opened:
            yield Lab(opened, PinCache(default_path(), trusted=self.trust_source), connect)

    @contextmanager
    def lab_if_any(self) -> Iterator[Lab | None]:
        """Open everything, or nothing where no database was named and the project has none."""
        if self.db is None and not self.database.exists():
            yield None
            return
        with self.lab() as opened:
            yield opened


class App(typer.Typer):
    """Commands that all have --format and --quiet, and --db where they use the record."""

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(help=help, no_args_is_help=True, rich_markup_mode=None, **settings)

    def add(self, name: str) -> Callable[[Command], Command]:
        """Register a function as a command: its parameters `desk` and `out` are made from the options in SHARED."""

        def register(function: Command) -> Command:
            signature = inspect.signature(function, eval_str=True)
            shared = [each for name, options in SHARED.items() if name in signature.parameters for each in options]
            own = [parameter for name, parameter in signature.parameters.items() if name not in SHARED]

            def command(context: typer.Context, **given: Any) -> None:
                for option, *_ in shared:
                    source = context.get_parameter_source(option)
                    if source is None or source.name != "COMMANDLINE":  # then what precedes the command decides
                        given[option] = context.find_root().params[option]
                if "desk" in signature.parameters:
                    given["desk"] = Desk(given.pop("db"))
                if "out" in signature.parameters:
                    given["out"] = Out(given.pop("format"), given.pop("quiet"))
                function(**given)

            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
            parameters += [parameter.replace(kind=keyword) for parameter in own]
            parameters += [inspect.Parameter(n, keyword, annotation=option, default=d) for n, option, d in shared]
            command.__name__, command.__doc__ = function.__name__, function.__doc__
            command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            self.command(name)(command)
            return function

        return register


def seconds(max_minutes: float | None) -> float:
    """Return a limit of minutes in seconds, 0 for none; raises SpecError if it leaves no time at all."""
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise SpecError(f"{max_minutes:g} minutes are no time to measure in", next="dgxlab ab --help")
    return 60 * (max_minutes or 0.0)


def experiment(spec: str, overrides: Sequence[str] | None = None, host: str | None = None) -> Experiment:
    """Read the spec of that path, or of that name anywhere below the project's experiments/.

    Raises:
        SpecError: if anything is wrong with it; never without the command that looks at it again.
    """
    from dgxlab.spec import load

    path = _spec_file(spec)
    try:
        return load(path, overrides or (), host)
    except SpecError as error:
        words = ["dgxlab", "plan", str(path)] if path.is_file() else ["ls", str(path.parent)]
        error.next = error.next or shlex.join(words)
        raise


def _spec_file(spec: str) -> Path:
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


def hosts_files() -> tuple[Path, Path]:
    """Return where hosts.yaml is looked for: the user's own, then the project's."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "dgxlab" / "hosts.yaml", root() / "hosts.yaml"


@contextmanager
def naming_a_host(instead: str = "") -> Iterator[None]:
    """For a job that is not in the record, give a host's list as `next` where it is `instead`: the first over ssh."""
    try:
        yield
    except UsageError as error:
        if error.next == instead:
            from dgxlab.spec.hosts import load_hosts

            hosts = load_hosts(hosts_files()).values()
            error.next = f"dgxlab jobs --host {next((host.name for host in hosts if host.ssh), 'local')}"
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
