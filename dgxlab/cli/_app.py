"""Shared by all commands: options, and how the project, its record, its experiments and hosts are opened."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from dgxlab.cli import _complete
from dgxlab.errors import HostError, SpecError, command
from dgxlab.project import MARKER, hosts_files, is_marked, or_init, root, spec_at, specs

if TYPE_CHECKING:
    from dgxlab.lab import Lab
    from dgxlab.model import Experiment
    from dgxlab.store import Store
    from dgxlab.transport.host import Host

Command = TypeVar("Command", bound=Callable[..., None])

Word = StrEnum("Word", ["faster", "slower", "same", "inconclusive", "invalid"])  # verdicts of a chain

DbOption = Annotated[
    Path | None, Option("--db", envvar="DGXLAB_DB", help="The database; results.db of this project by default.")
]
TrustSourceOption = Annotated[
    bool, Option("--trust-source", help="Fetch from a package that dgxlab does not know the digest of.")
]
FailOnOption = Annotated[
    list[Word] | None, Option("--fail-on", help="Exit with 11 where this is a verdict; may be given again.")
]
WideOption = Annotated[bool, Option("--wide", help="Show every column, and each run and cycle left out.")]
JOB = "its id, enough of its beginning, or its last six characters"
JobArgument = Annotated[str, Argument(help=f"A job: {JOB}.", autocompletion=_complete.sessions)]


@dataclass(frozen=True)
class Workspace:
    """The project and the record that a command works with."""

    db: DbOption = None  # None for results.db of the project
    project: Path | None = None  # the folder; None for the project of the current folder
    trust_source: bool = False  # whether a pin may come from a package without a known digest

    @property
    def database(self) -> Path:
        """Path of the record."""
        return self.db or (self.project or root()) / "results.db"

    @property
    def where(self) -> str:
        """A line that names both: without a marker the project is guessed."""
        folder = self.project or root()
        guessed = "" if is_marked(folder) else f" (guessed; mark it with: {command('touch', folder / MARKER)})"
        return f"project {folder}{guessed}, record {self.database.absolute()}"

    def store(self, *, create: bool = False) -> Store:
        """Open the record; the caller closes it."""
        from dgxlab.store import Store

        return Store.open(self.database, create=create)

    @contextmanager
    def lab(self, *, create: bool = False) -> Iterator[Lab]:
        """Open the record and the pin cache for a use case."""
        from dgxlab.lab import Lab
        from dgxlab.source import PinCache

        with self.store(create=create) as opened:
            yield Lab(opened, PinCache(trusted=self.trust_source), connect)

    @contextmanager
    def lab_if_any(self) -> Iterator[Lab | None]:
        """Open them as `lab` does; None if the project has no record and none is named by --db."""
        if self.db is None and not self.database.exists():
            yield None
            return
        with self.lab() as opened:
            yield opened


class App(typer.Typer):
    """A group of commands. A parameter that is a dataclass becomes one option per annotated field."""

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(help=help, no_args_is_help=True, rich_markup_mode=None, **{"cls": Group, **settings})

    def add(self, function: Command) -> Command:
        """Make a function a command; --db, --format and --quiet may be given before its name or after it."""
        name = function.__name__.rstrip("_").replace("_", "-")
        kind: Any = partial(_Command, function)
        self.command(name, cls=kind, help=function.__doc__)(lambda: None)
        return function


class Group(TyperGroup):
    """What a group of commands is to a command line."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_typed(ctx, super().get_params(ctx))


class _Command(TyperCommand):
    """A command whose options are read when they are asked for: the program's --help lists all and needs none."""

    def __init__(self, function: Callable[..., None], **settings: Any) -> None:
        super().__init__(**settings)
        self._function = function

    @cached_property
    def _read(self) -> TyperCommand:
        alone = typer.Typer(add_completion=False)
        alone.command()(_flat(self._function))
        return typer.main.get_command(alone)  # type: ignore[return-value]

    def get_params(self, ctx: Any) -> list[Any]:
        self.params, self.callback = self._read.params, self._read.callback
        return _as_typed(ctx, super().get_params(ctx))


def _as_typed(context: typer.Context, parameters: list[Any]) -> list[Any]:
    """Leave the words as they were typed while a shell completes one: typer reads them with pydantic, 0.08 s."""
    for parameter in parameters if context.resilient_parsing else ():
        parameter.process_value = lambda _, value: value
    return parameters


def _flat(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of as many parameters as typer shall see: one for each field of a dataclass."""
    own: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            group: Any = parameter.annotation
            fields = inspect.signature(group, eval_str=True).parameters.values()
            groups[parameter.name] = (group, [each for each in fields if hasattr(each.annotation, "__metadata__")])
        else:
            own.append(parameter)

    def command(context: typer.Context, **given: Any) -> None:
        for option, value in context.find_root().params.items():
            source = context.get_parameter_source(option)
            if option in given and (source is None or source.name != "COMMANDLINE"):
                given[option] = value
        for name, (group, options) in groups.items():
            given[name] = group(**{option.name: given.pop(option.name) for option in options})
        function(**given)

    shown = [*own, *(option for _, options in groups.values() for option in options)]
    first = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [first, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shown)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def experiment(spec: str, overrides: Sequence[str] | None = None, host: str | None = None) -> Experiment:
    """Read a spec by its path, or by its name below experiments/; SpecError with the command that checks it again."""
    from dgxlab.spec import load

    with _found(spec) as path:
        return load(path, overrides or (), host)


def experiments(spec: str, overrides: Sequence[str] | None = None, host: str | None = None) -> list[Experiment]:
    """Read a spec as `experiment`, which may be a sweep: all its experiments."""
    from dgxlab.spec import load_all

    with _found(spec) as path:
        return load_all(path, overrides or (), host)


@contextmanager
def _found(spec: str) -> Iterator[Path]:
    """Yield the path of a spec, to be read inside; an error about it gets the command that checks it again."""
    path = find_spec(spec)
    try:
        yield path
    except SpecError as error:
        mend = command("dgxlab", "plan", path) if path.is_file() else or_init(command("ls", path.parent))
        error.next = error.next or mend
        raise


def readable_experiments(note: Callable[[str], None]) -> list[Experiment]:
    """Read all specs of the project but sweeps; `note` is told of those that are wrong, which are being edited."""
    read = []
    for path in chain.from_iterable(specs(root()).values()):
        try:
            one, *others = experiments(str(path))
            read += [] if others else [one]
        except SpecError as error:
            note(f"left out: {error.message}")
    return read


def find_spec(spec: str) -> Path:
    from dgxlab.spec.resolve import label

    path, experiments = Path(spec), label(root() / "experiments")
    if path.name == "hosts.yaml":
        raise SpecError(f"{spec} is about hosts, and no experiment", next=command("ls", "-R", experiments))
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return spec_at(path)
    known = specs(root())
    if named := known.get(spec):  # the reader refuses one of several
        return Path(label(named[0]))
    if path.exists():  # a folder, for example: the reader refuses it
        return path
    if mend := or_init(""):
        raise SpecError(f"no experiment {spec!r}: {root()} is no project, and {mend} makes one", next=mend)
    near = "".join(f"; there is {name!r}" for name in difflib.get_close_matches(spec, known, n=1))
    raise SpecError(f"{experiments} has no experiment {spec!r}{near}", next=command("ls", "-R", experiments))


def connect(name: str) -> Host:
    """Return a host by name, without connecting yet.

    Raises HostError if a project's entry lacks the user's consent, or the host is this machine and not Linux.
    """
    from dgxlab.spec.hosts import find_host
    from dgxlab.transport.host import Host
    from dgxlab.transport.local import LocalTransport

    entry = find_host(name, hosts_files())
    if not entry.ssh:
        if sys.platform != "linux":
            message = f"host {name} is this machine, and jobs run on Linux alone, which this is not ({sys.platform})"
            raise HostError(message, next="dgxlab host add --help")
        return Host(LocalTransport(entry.root, name, entry.python), entry)
    from dgxlab.transport.ssh import SshTransport

    return Host(SshTransport(name, entry.ssh, entry.root, entry.python or "python3"), entry)
